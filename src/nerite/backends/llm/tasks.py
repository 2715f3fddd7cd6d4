"""What a model is for, by its configuration and the files that lie in its version directory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from nerite.backends.interface import ModelContext
from nerite.backends.llm import checkpoint
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument

PARAMETER: Final = "TASK"
GENERATE: Final = "generate"
EMBED: Final = "embed"
RERANK: Final = "rerank"
_TASKS: Final = (GENERATE, EMBED, RERANK)

_SENTENCE_TRANSFORMERS: Final = ("modules.json", "config_sentence_transformers.json")


def task(context: ModelContext) -> str:
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
    named = checkpoint.described(directory).get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
