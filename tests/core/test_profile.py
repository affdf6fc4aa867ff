import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochunk import CostModel
from isochunk.core.cost import Bend
from isochunk.core.curve import Curve
from isochunk.core.errors import ProfileError
from isochunk.core.profile import (
    FORMAT_VERSION,
    Profile,
    default_folder,
    is_profile,
    key_name,
    load_profile,
    save_profile,
)


def test_what_is_saved_is_loaded(tmp_path: Path, model: CostModel) -> None:
    profile = Profile(model=model, stage_models=(model, model.scaled(2)), key={"device": "cpu"}, source="probe")
    save_profile(tmp_path / "a" / "p.json", profile)
    assert load_profile(tmp_path / "a" / "p.json", key={"device": "cpu"}) == profile
    assert os.listdir(tmp_path / "a") == ["p.json"]


def test_bare_coefficients_are_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"stages": 2, "c0": 0.1, "c1": 1e-5, "c2": 1e-9, "source": "published"}')
    assert load_profile(path).models == CostModel(0.1, 1e-5, 1e-9, 0.0)


def test_another_deployment_is_refused(tmp_path: Path, model: CostModel) -> None:
    save_profile(tmp_path / "p.json", Profile(model=model, key={"device": "cpu", "dtype": "float32"}))
    with pytest.raises(ProfileError, match="another deployment: dtype differ"):
        load_profile(tmp_path / "p.json", key={"device": "cpu", "dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"format": "isochunk-profile", "vers', "not JSON"),
        ("[1, 2]", "holds a list"),
        ('{"format": "other"}', "not an isochunk profile"),
        ('{"hello": 1}', "not an isochunk profile"),
        (json.dumps({"format": "isochunk-profile", "version": FORMAT_VERSION + 1}), "newer"),
        ('{"format": "isochunk-profile", "version": "1"}', "version = '1'"),
        ('{"format": "isochunk-profile", "version": 1}', "no coefficients"),
        ('{"format": "isochunk-profile", "version": 1, "model": {"c0": 1, "c1": 1}}', "c2 is missing"),
        ('{"format": "isochunk-profile", "version": 1, "stages": 3, "model": {}}', "'stages' must be a list"),
        ('{"c0": 0, "c1": 1e-5, "c2": 1e-9, "c3": 0}', "c0 = 0"),
        ('{"c0": NaN, "c1": 1e-5, "c2": 1e-9, "c3": 0}', "c0 = nan"),
        ('{"c0": 0.1, "c1": 1e-5, "c2": -1e-9, "c3": 0}', "c2 = -1e-09"),
        ('{"c0": "x", "c1": 1e-5, "c2": 1e-9, "c3": 0}', "c0 = 'x'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as error:
        load_profile(path)
    assert str(path) in str(error.value)


def test_a_binary_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    for name in ("p.json", "none.json"):
        with pytest.raises(ProfileError, match=name):
            load_profile(tmp_path / name)


WRITER = """
import sys
from pathlib import Path
from isochunk import CostModel
from isochunk.core.curve import Curve
from isochunk.core.profile import Profile, save_profile
number = float(sys.argv[2])
profile = Profile(model=CostModel(number, number, number, number), key={"writer": "x" * int(10_000 * number)})
while True:
    save_profile(Path(sys.argv[1]), profile)
"""


def test_servers_that_share_a_profile_never_see_half_of_one(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)]) for number in (1, 2, 3)]
    try:
        seen: list[float] = []
        deadline = time.monotonic() + 60
        while len(set(seen)) < 3 or len(seen) < 500:
            assert time.monotonic() < deadline
            assert not any(writer.poll() for writer in writers)
            if path.exists():
                model = load_profile(path).model
                assert len(set(model.as_dict().values())) == 1
                seen.append(model.c0)
    finally:
        for writer in writers:  # in the middle of whatever they write
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    assert load_profile(path).model.c0 in seen


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, model: CostModel) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="can't write"):
        save_profile(tmp_path / "file" / "p.json", Profile(model=model))


def test_a_profile_is_as_readable_as_any_new_file(tmp_path: Path, model: CostModel) -> None:
    for umask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            save_profile(tmp_path / f"{umask}.json", Profile(model=model))
        finally:
            os.umask(before)
        assert (tmp_path / f"{umask}.json").stat().st_mode & 0o777 == mode
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_curve_and_a_bend_are_kept(tmp_path: Path) -> None:
    model = CostModel(0.004, 1e-5, 1e-9, curve=Curve((1, 512, 513), (0.005, 0.006, 0.009)), bend=Bend(65_536, 1.5))
    save_profile(tmp_path / "p.json", Profile(model=model, stage_models=(model, model.scaled(2))))
    assert load_profile(tmp_path / "p.json").models == (model, model.scaled(2))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        "9" * 100_000,
        '{"c0": ' + "9" * 400 + ', "c1": 1, "c2": 1}',
        " " * (5 << 20),
        "\ud800",
    ],
)
def test_bombs_and_huge_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ProfileError, match=r"p\.json"):
        load_profile(path)
    assert not is_profile(path) or text.startswith('{"c0"')


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / ("x" * 300)):
        with pytest.raises(ProfileError, match="can't read"):
            load_profile(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
SECTIONS = ("version", "model", "stages", "floors", "key", "fit", "source", "decode", "format")


@given(st.sampled_from(SECTIONS), json_values, st.sampled_from(["c0", "c3", "curve", "bend", None]))
def test_whatever_stands_in_a_profile_is_read_or_refused(section: str, value: object, inner: str | None) -> None:
    good = CostModel(0.004, 1e-5, 1e-9).as_dict()
    data = {"format": "isochunk-profile", "version": 1, "model": good, "key": {"a": 1}}
    data |= {"model": {**good, inner: value}} if section == "model" and inner else {section: value}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.json"
        path.write_text(json.dumps(data))
        with suppress(ProfileError):
            assert isinstance(load_profile(path, key={"a": 1}).model, CostModel)


def test_a_file_from_before_the_key_told_more_is_read(tmp_path: Path, model: CostModel) -> None:
    save_profile(tmp_path / "p.json", Profile(model=model, key={"device": "cpu"}))
    assert load_profile(tmp_path / "p.json", key={"device": "cpu", "asynchronous": True}).model == model
    save_profile(tmp_path / "p.json", Profile(model=model, key={"device": "cpu", "asynchronous": False}))
    with pytest.raises(ProfileError, match="asynchronous differ"):
        load_profile(tmp_path / "p.json", key={"device": "cpu", "asynchronous": True})


def test_the_name_depends_on_the_key_alone() -> None:
    assert key_name({"a": 1, "b": 2}) == key_name({"b": 2, "a": 1}) != key_name({"a": 1, "b": 3})


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ISOCHUNK_CACHE", raising=False)
    assert default_folder() == tmp_path / "isochunk"
    monkeypatch.setenv("ISOCHUNK_CACHE", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own"


def test_the_cost_of_decodes_is_kept(tmp_path: Path) -> None:
    decode = CostModel.measured(Curve((1.0, 64.0, 256.0), (0.01, 0.012, 0.03)), 0.0, 2e-8)
    save_profile(tmp_path / "p.json", Profile(model=CostModel(0.01, 1e-5, 1e-9), decode=decode))
    assert load_profile(tmp_path / "p.json").decode == decode
