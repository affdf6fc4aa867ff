"""A plugin of pytest that says on which vLLM the tests run."""

from __future__ import annotations

from pathlib import Path

__all__ = ["pytest_report_header"]


def pytest_report_header() -> str:
    """Version and place of the vLLM that is imported."""
    import vllm
    from isochunk.vllm.compat import vllm_version

    return f"vLLM {vllm_version()} at {Path(vllm.__file__).parent}"
