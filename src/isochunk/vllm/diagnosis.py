"""What the flag would do in this environment, found by vLLM itself; a program of its own, since vLLM may not load.

    python -m isochunk.vllm.diagnosis MODEL [vLLM options]

prints one JSON object, whatever happens: ``{"vllm", "platform", "device", "flag", "refused"}``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

__all__: list[str] = []


def main(arguments: list[str]) -> dict[str, Any]:
    """Load vLLM with its plugins and make the engine's configuration, as a server does before it takes a device."""
    found: dict[str, Any] = {}
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.version import __version__

        found["vllm"] = str(__version__)
        found["platform"] = str(current_platform.device_type)
        with contextlib.suppress(Exception):  # not every platform can tell, and no other answer depends on it
            found["device"] = str(current_platform.get_device_name())
        load_general_plugins()
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
        options = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", *arguments]))
        chosen = options.create_engine_config().scheduler_config.scheduler_cls
        found["flag"] = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", None)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is the answer
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(sys.argv[1:])
    json.dump(result, sys.stdout)
