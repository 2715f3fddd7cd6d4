"""What the directory of a language model holds: files of OpenVINO, a checkpoint, or the arguments of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

from nerite.backends.interface import ModelContext
from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument

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


class CheckpointContent(Enum):
    """What an engine finds there."""

    OPENVINO = "OpenVINO's files of a model"
    CHECKPOINT = "a checkpoint of Hugging Face"
    ARGUMENTS = f"arguments of vLLM ({ARGUMENTS})"
    NOTHING = "no language model"


def checkpoint_content(directory: Path) -> CheckpointContent:
    """Return what ``directory`` holds. What is ready to run goes before what has to be converted."""
    if any((directory / name).is_file() for name in _MODELS):
        return CheckpointContent.OPENVINO
    if (directory / ARGUMENTS).is_file():
        return CheckpointContent.ARGUMENTS
    if (directory / CONFIG).is_file() and any(each.name.endswith(_WEIGHTS) for each in checkpoint_files(directory)):
        return CheckpointContent.CHECKPOINT
    return CheckpointContent.NOTHING


def checkpoint_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint, in their order."""
    if directory.is_dir():
        yield from (each for each in sorted(directory.iterdir()) if each.is_file() and not each.name.startswith("."))


def describe_content(directory: Path, file: str = CONFIG) -> dict[str, Any]:
    """Return what is in a JSON file of a checkpoint; empty where that is none."""
    try:
        found = json.loads((directory / file).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# What a model is for, by its configuration and the files that lie in its version directory.

PARAMETER: Final = "TASK"
GENERATE: Final = "generate"
EMBED: Final = "embed"
RERANK: Final = "rerank"
_TASKS: Final = (GENERATE, EMBED, RERANK)

_SENTENCE_TRANSFORMERS: Final = ("modules.json", "config_sentence_transformers.json")


def task_of(context: ModelContext) -> str:
    """Return ``generate``, ``embed`` or ``rerank``. Raises ``InvalidArgument`` for what the parameter cannot be."""
    said = context.parameter(PARAMETER)
    if said in _TASKS:
        return said
    if said:
        meant = nearest(said, _TASKS)
        raise InvalidArgument(
            f"parameter '{PARAMETER}' of model '{context.name}' is '{said}'. "
            + (f"Did you mean {meant}?" if meant else f"There are: {', '.join(_TASKS)}.")
        )
    directory = context.version_directory
    if any((directory / name).is_file() for name in _SENTENCE_TRANSFORMERS):
        return EMBED
    for architecture in architectures(directory):
        if architecture.endswith("ForSequenceClassification"):
            return RERANK
        # What no head for a task is on: BertModel, XLMRobertaModel.
        if architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
            return EMBED
    return GENERATE


def architectures(directory: Path) -> list[str]:
    """Return what the checkpoint's config.json says of it; nothing where that does not."""
    named = describe_content(directory).get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
