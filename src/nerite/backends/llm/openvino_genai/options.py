"""How the pipeline of a model has to be made: from the files of its version and the parameters of its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nerite.backends import values
from nerite.backends.cores import usable_cores
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.llm import checkpoint
from nerite.backends.llm.checkpoint import Content
from nerite.backends.llm.conversion import converted
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument, Unavailable

MODEL: Final = "openvino_model.xml"
_FILES: Final = (MODEL, "openvino_tokenizer.xml", "openvino_detokenizer.xml")
_CHECKPOINT: Final = "config.json"

_OWN: Final = (
    "ENABLE_PREFIX_CACHING",
    "ENGINE",
    "INFERENCE_NUM_THREADS",
    "KV_CACHE_GB",
    "MAX_MODEL_LEN",
    "MAX_NUM_BATCHED_TOKENS",
    "MAX_NUM_SEQS",
    "NUM_KV_BLOCKS",
    "TARGET_DEVICE",
    "WEIGHT_FORMAT",
)
_PROPERTIES: Final = (
    "CACHE_DIR",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    "ENABLE_CPU_PINNING",
    "EXECUTION_MODE_HINT",
    "INFERENCE_PRECISION_HINT",
    "KV_CACHE_PRECISION",
)
"""Parameters that are handed on to OpenVINO as they are."""
_ELSEWHERE: Final = ("EXECUTION_MODE", "EXECUTION_ENV_PATH", "STEP_TIMEOUT_SECONDS", "WORKER")
_CLOSE: Final = 0.8


@dataclass(frozen=True)
class Options:
    """What a pipeline is made of."""

    name: str
    """Of the instance."""
    directory: Path
    device: str = "CPU"
    properties: Mapping[str, str | int] | None = None
    most_sequences: int = 256
    batched_tokens: int = 256
    """Tokens that one step computes; a longer prompt takes several."""
    cache_gb: int = 4
    """Of memory for KV, which is taken as it is needed."""
    cache_blocks: int = 0
    """Instead of ``cache_gb``, where it is above 0."""
    prefix_caching: bool = True
    context_length: int = 0
    """0: as the model and the cache have it."""


def check_files(context: ModelContext) -> None:
    """Raise ``Unavailable`` if the version directory lacks what an engine needs, with what brings it."""
    directory = context.version_directory
    if checkpoint.content(directory) is Content.CHECKPOINT:
        return  # What it is converted to has everything.
    missing = [file for file in _FILES if not (directory / file).is_file()]
    if not missing:
        return
    raise Unavailable(
        f"model '{context.name}': '{directory}' has no {', '.join(missing)}. A language model is a directory that "
        "'optimum-cli export openvino' has made"
    )


def read(context: ModelContext, instance: InstanceContext) -> Options:
    """Return what configuration and files say; convert a checkpoint, if that was not done. Raises ``NeriteError``."""
    check_files(context)
    _check_names(context)
    standard = Options(instance.name, converted(context))
    properties: dict[str, str | int] = {}
    threads = values.thread_count(context, "INFERENCE_NUM_THREADS")
    device = context.parameter("TARGET_DEVICE", "CPU").upper()
    if device == "CPU":
        properties = {
            "INFERENCE_NUM_THREADS": threads or len(instance.cores) or usable_cores(),
            "ENABLE_CPU_PINNING": "NO",
        }
    properties |= {name: context.parameter(name) for name in _PROPERTIES if context.parameter(name)}
    return Options(
        instance.name,
        standard.directory,
        device,
        properties,
        _count(context, "MAX_NUM_SEQS", standard.most_sequences),
        _count(context, "MAX_NUM_BATCHED_TOKENS", standard.batched_tokens),
        _count(context, "KV_CACHE_GB", standard.cache_gb),
        _count(context, "NUM_KV_BLOCKS", standard.cache_blocks),
        values.flag(context, "ENABLE_PREFIX_CACHING", default=standard.prefix_caching),
        _context_length(context),
    )


def _check_names(context: ModelContext) -> None:
    known = (*_OWN, *_PROPERTIES, *_ELSEWHERE)
    for key in context.config.get("parameters", {}):
        if key not in known and (meant := nearest(key.upper(), known, _CLOSE)):
            raise InvalidArgument(f"model '{context.name}' has the parameter '{key}'. Did you mean {meant}?")


def _count(context: ModelContext, key: str, default: int) -> int:
    number = values.parameter(context, key, str(default), values.integer, "a number above 0")
    if number < 1 and context.parameter(key):
        raise InvalidArgument(f"parameter '{key}' of model '{context.name}' is {number}; it has to be above 0")
    return number


def _context_length(context: ModelContext) -> int:
    wanted, own = _count(context, "MAX_MODEL_LEN", 0), _positions(context.version_directory / _CHECKPOINT)
    if own and wanted > own:
        raise InvalidArgument(
            f"parameter 'MAX_MODEL_LEN' of model '{context.name}' is {wanted}, and the model has {own} positions"
        )
    return wanted or own


def _positions(file: Path) -> int:
    """Return how many positions a model has by its config.json; 0 where that does not say."""
    try:
        described: Any = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return 0
    if not isinstance(described, dict):
        return 0
    inner = described.get("text_config")
    for place in (described, inner if isinstance(inner, dict) else {}):
        if isinstance(positions := place.get("max_position_embeddings"), int):
            return max(positions, 0)
    return 0
