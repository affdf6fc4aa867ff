import subprocess
import sys

import isochunk


def test_public_names_are_these() -> None:
    assert isochunk.__all__ == ["CostModel", "Fit", "IsochunkError", "Plan", "fit", "makespan", "plan"]
    assert all(hasattr(isochunk, name) for name in isochunk.__all__)


def test_import_is_light() -> None:
    code = (
        "import sys, isochunk; "
        "heavy = {'scipy', 'pydantic', 'typer', 'rich', 'vllm', 'torch', 'httpx', 'matplotlib'} & set(sys.modules); "
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
