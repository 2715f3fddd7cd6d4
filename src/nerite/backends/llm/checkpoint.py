"""What the directory of a language model holds: files of OpenVINO, a checkpoint, or the arguments of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

ARGUMENTS: Final = "model.json"
"""The arguments of vLLM, as Triton's backend for it has them."""
CONFIG: Final = "config.json"
_MODELS: Final = ("openvino_model.xml", "openvino_language_model.xml")
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")


KINDS: Final = (
    "a checkpoint of Hugging Face (config.json, *.safetensors, a tokenizer), OpenVINO's files of one "
    f"({_MODELS[0]}), or arguments of vLLM ({ARGUMENTS})"
)
"""What there can be."""


class Content(Enum):
    """What an engine finds there."""

    OPENVINO = "OpenVINO's files of a model"
    CHECKPOINT = "a checkpoint of Hugging Face"
    ARGUMENTS = f"arguments of vLLM ({ARGUMENTS})"
    NOTHING = "no language model"


def content(directory: Path) -> Content:
    """Return what ``directory`` holds. What is ready to run goes before what has to be converted."""
    if any((directory / name).is_file() for name in _MODELS):
        return Content.OPENVINO
    if (directory / ARGUMENTS).is_file():
        return Content.ARGUMENTS
    if (directory / CONFIG).is_file() and any(each.name.endswith(_WEIGHTS) for each in files(directory)):
        return Content.CHECKPOINT
    return Content.NOTHING


def files(directory: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint, in their order."""
    if directory.is_dir():
        yield from (each for each in sorted(directory.iterdir()) if each.is_file() and not each.name.startswith("."))


def described(directory: Path, file: str = CONFIG) -> dict[str, Any]:
    """Return what is in a JSON file of a checkpoint; empty where that is none."""
    try:
        found = json.loads((directory / file).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
