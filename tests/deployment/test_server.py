import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""
_PARENT = """
import os, signal, sys, time
from pathlib import Path
from isochunk.deployment.server import child_process
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup does not leave it so,
signal.signal(signal.SIGINT, signal.default_int_handler)  # nor does a shell's & leave this one
with child_process([sys.executable, "-c", sys.argv[1]], dict(os.environ), Path(sys.argv[2])) as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""


def _of_group(group: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = stat.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue  # it has ended
        if int(of) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_ends_us_ends_the_servers_and_their_children(tmp_path: Path, sign: signal.Signals) -> None:
    command = [sys.executable, "-c", _PARENT, _CHILD, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        deadline = time.monotonic() + 10
        while len(_of_group(group)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(_of_group(group)) == 2
        assert all(os.getsid(pid) == os.getsid(0) for pid in _of_group(group))  # servers share cores as one
        parent.send_signal(sign)
        assert parent.wait(30) != 0
    assert _of_group(group) == []
