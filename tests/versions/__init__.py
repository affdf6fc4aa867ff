"""isochunk's tests on other versions of vLLM: ``python -m tests.versions --help``."""
