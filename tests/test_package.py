import subprocess
import sys

import isochunk


def test_public_names_are_these() -> None:
    assert isochunk.__all__ == ["CostModel", "Fit", "IsochunkError", "Plan", "fit", "makespan", "plan"]
    assert all(hasattr(isochunk, name) for name in isochunk.__all__)


def test_import_is_light() -> None:
    code = (
        "import time, sys; t = time.perf_counter(); import isochunk; t = time.perf_counter() - t; "
        "heavy = {'scipy', 'pydantic', 'typer', 'rich', 'vllm', 'torch', 'httpx', 'matplotlib'} & set(sys.modules); "
        "print(t, sorted(heavy))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(" ", 1)
        for _ in range(3)
    ]
    assert min(float(seconds) for seconds, _ in runs) < 0.3
    assert {heavy.strip() for _, heavy in runs} == {"[]"}
