"""Recognizes what a language model's directory holds (OpenVINO files, a checkpoint, vLLM arguments), and its task."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

from nerite.backends.interface import ModelContext
from nerite.config.mistake import nearest
from nerite.core.bounded_files import read_json
from nerite.core.errors import InvalidArgument

ARGUMENTS: Final = "model.json"
"""File with the arguments of vLLM, as in Triton's vLLM backend."""
CONFIG: Final = "config.json"
ENCODER_MODEL: Final = "openvino_encoder_model.xml"
"""The encoder of a speech model, which has a decoder beside it."""
PARTS: Final = "model_index.json"
"""The list of the parts of a diffusion model, each of which has a directory."""
_MODELS: Final = ("openvino_model.xml", "openvino_language_model.xml", ENCODER_MODEL, PARTS)
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")


KINDS: Final = (
    "a Hugging Face checkpoint (config.json, *.safetensors, a tokenizer), OpenVINO files converted from one "
    f"({_MODELS[0]}), a GGUF file, or arguments of vLLM ({ARGUMENTS})"
)
"""The possible contents, for messages."""


class CheckpointContent(Enum):
    """Kind of content of a version directory. Values are used in messages."""

    OPENVINO = "OpenVINO files"
    CHECKPOINT = "a Hugging Face checkpoint"
    GGUF = "a GGUF file"
    ARGUMENTS = f"arguments of vLLM ({ARGUMENTS})"
    NOTHING = "no language model"


def checkpoint_content(directory: Path) -> CheckpointContent:
    """Return the content of ``directory``. Files that can run as they are take precedence over a checkpoint."""
    if any((directory / name).is_file() for name in _MODELS):
        return CheckpointContent.OPENVINO
    if (directory / ARGUMENTS).is_file():
        return CheckpointContent.ARGUMENTS
    if (directory / CONFIG).is_file() and any(each.name.endswith(_WEIGHTS) for each in checkpoint_files(directory)):
        return CheckpointContent.CHECKPOINT
    return CheckpointContent.GGUF if gguf_file(directory) else CheckpointContent.NOTHING


def gguf_file(directory: Path) -> Path | None:
    """Return the only GGUF file in a directory; None if there is none, or more than one."""
    found = [each for each in checkpoint_files(directory) if each.suffix.lower() == ".gguf"]
    return found[0] if len(found) == 1 else None


GENERATION: Final = "generation_config.json"
"""File of a checkpoint that is read when the model runs, and is no part of its conversion."""
_ENDS: Final = "eos_token_id"


def end_tokens(directory: Path) -> frozenset[int] | None:
    """Return the tokens by which a checkpoint's model ends its answer; None if its files do not say."""
    for file in (GENERATION, CONFIG):
        named = describe_content(directory, file).get(_ENDS)
        tokens = named if isinstance(named, list) else [named]
        if tokens and all(type(token) is int and token >= 0 for token in tokens):
            return frozenset(tokens)
    return None


def checkpoint_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint, sorted by name."""
    if directory.is_dir():
        yield from (each for each in sorted(directory.iterdir()) if each.is_file() and not each.name.startswith("."))


def describe_content(directory: Path, file: str = CONFIG) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint; empty if the file is missing or holds no object."""
    try:
        found = read_json(directory / file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# The task of a model, determined from its configuration and the files in its version directory

PARAMETER: Final = "TASK"
GENERATE: Final = "generate"
EMBED: Final = "embed"
RERANK: Final = "rerank"
CLASSIFY: Final = "classify"
TRANSCRIBE: Final = "transcribe"
TEXT_TO_SPEECH: Final = "text_to_speech"
TEXT_TO_IMAGE: Final = "text_to_image"
_TASKS: Final = (GENERATE, EMBED, RERANK, CLASSIFY, TRANSCRIBE, TEXT_TO_SPEECH, TEXT_TO_IMAGE)

_TRANSCRIBING: Final = ("WhisperForConditionalGeneration",)
_SPEECH: Final = ("SpeechT5ForTextToSpeech",)
_SENTENCE_TRANSFORMERS: Final = ("modules.json", "config_sentence_transformers.json")


def task_of(context: ModelContext) -> str:
    """Return what a model does, one of ``_TASKS``. Raises ``InvalidArgument`` if the parameter is invalid."""
    configured = context.parameter(PARAMETER)
    if configured in _TASKS:
        return configured
    if configured:
        meant = nearest(configured, _TASKS)
        raise InvalidArgument(
            f"parameter '{PARAMETER}' of model '{context.name}' is '{configured}'. "
            + (f"Did you mean {meant}?" if meant else f"There are: {', '.join(_TASKS)}.")
        )
    directory = context.version_directory
    if (directory / PARTS).is_file():
        return TEXT_TO_IMAGE
    if any((directory / name).is_file() for name in _SENTENCE_TRANSFORMERS):
        return EMBED
    for architecture in architectures(directory):
        if architecture.endswith("ForSequenceClassification"):
            return CLASSIFY if len(labels_of(directory)) > 1 else RERANK
        if architecture in _TRANSCRIBING:
            return TRANSCRIBE
        if architecture in _SPEECH:
            return TEXT_TO_SPEECH
        # Architectures without a task head, such as BertModel and XLMRobertaModel.
        if architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
            return EMBED
    return GENERATE


def labels_of(directory: Path) -> list[str]:
    """Return the names of the classes in the checkpoint's config.json, in the order of their numbers."""
    named = describe_content(directory).get("id2label")
    try:
        numbered = sorted((int(number), str(label)) for number, label in named.items()) if named else []
    except (AttributeError, ValueError):
        return []
    return [label for _, label in numbered]


def architectures(directory: Path) -> list[str]:
    """Return the architectures that the checkpoint's config.json names; empty if it names none."""
    named = describe_content(directory).get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
