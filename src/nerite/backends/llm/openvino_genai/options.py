"""How the pipeline of a model has to be made: from the files of its version and the parameters of its configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from nerite.backends import values
from nerite.backends.cores import usable_cores
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.llm import checkpoint, parameters, tasks
from nerite.backends.llm.checkpoint import Content
from nerite.backends.llm.conversion import converted
from nerite.backends.llm.openvino_genai import lora
from nerite.backends.llm.openvino_genai.lora import LoraAdapter
from nerite.core.errors import InvalidArgument, Unavailable

_log = logging.getLogger("nerite.backends.llm")

MODEL: Final = "openvino_model.xml"
SEEING_MODEL: Final = "openvino_language_model.xml"
"""The same of a model that takes images, which has others for them."""
_FILES: Final = (MODEL, "openvino_tokenizer.xml", "openvino_detokenizer.xml")
_SEEING_FILES: Final = (
    SEEING_MODEL,
    "openvino_text_embeddings_model.xml",
    "openvino_vision_embeddings_model.xml",
    *_FILES[1:],
)

_COMMON: Final = frozenset(
    {"INFERENCE_NUM_THREADS", "MAX_MODEL_LEN", "TARGET_DEVICE", "WEIGHT_FORMAT", *parameters.OF_OPENVINO}
)
KNOWN: Final = frozenset(
    {
        *_COMMON,
        *("MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS", "NUM_KV_BLOCKS"),
        *(parameters.CACHE, parameters.PREFIX_CACHING),
        *parameters.SPECULATION,
    }
)
_EMBEDDING: Final = frozenset({"NORMALIZE", "POOLING_TYPE"})
_ENGINE: Final = "the engine openvino_genai"

_POOLINGS: Final = {"CLS": "CLS", "MEAN": "MEAN", "LAST": "LAST_TOKEN"}
"""vLLM's names, and the framework's."""
_POOLING_FILE: Final = "1_Pooling/config.json"
_POOLING_MODES: Final = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}
"""How that file of Sentence Transformers says it."""


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
    adapter: LoraAdapter | None = None
    """What all requests are answered with."""
    draft: Path | None = None
    """A smaller model that guesses tokens, which the model then looks at in one step."""
    lookup: int = 0
    """Instead of it: the text so far is the guess. So many tokens have to be the same before it."""
    guesses: int = 5
    """Tokens that are guessed at a time."""

    @property
    def speculates(self) -> bool:
        """Whether tokens are guessed."""
        return self.draft is not None or self.lookup > 0

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return (self.directory / SEEING_MODEL).is_file()

    @property
    def model(self) -> Path:
        """The network that makes tokens."""
        return self.directory / (SEEING_MODEL if self.sees else MODEL)


@dataclass(frozen=True)
class EncoderOptions:
    """What a pipeline for embeddings or for reranking is made of."""

    directory: Path
    device: str
    properties: Mapping[str, str | int]
    context_length: int
    """Tokens of a text; 0: nobody knows how many are too many."""
    pooling: str = "CLS"
    """How a vector is made of those of the tokens, by the framework's name."""
    normalize: bool = True
    """Whether vectors have length 1."""


def check_files(context: ModelContext, task: str) -> None:
    """Raise ``Unavailable`` if the version directory lacks what an engine needs, with what brings it."""
    directory = context.version_directory
    if checkpoint.content(directory) is Content.CHECKPOINT:
        return  # What it is converted to has everything.
    needed: Sequence[str] = _FILES if task == tasks.GENERATE else _FILES[:2]
    if task == tasks.GENERATE and (directory / SEEING_MODEL).is_file():
        needed = _SEEING_FILES
    missing = [file for file in needed if not (directory / file).is_file()]
    if not missing:
        return
    raise Unavailable(
        f"model '{context.name}': '{directory}' has no {', '.join(missing)}. A language model is a directory that "
        "'optimum-cli export openvino' has made"
    )


def read(context: ModelContext, instance: InstanceContext) -> Options:
    """Return what configuration and files say; convert a checkpoint, if that was not done. Raises ``NeriteError``."""
    check_files(context, tasks.GENERATE)
    parameters.check(context, KNOWN, _ENGINE)
    standard = Options(instance.name, converted(context))
    device, properties = _device(context, instance)
    speculation = parameters.speculation(context)
    return Options(
        instance.name,
        standard.directory,
        device,
        properties,
        parameters.count(context, "MAX_NUM_SEQS", standard.most_sequences),
        parameters.count(context, "MAX_NUM_BATCHED_TOKENS", standard.batched_tokens),
        parameters.count(context, parameters.CACHE, standard.cache_gb),
        parameters.count(context, "NUM_KV_BLOCKS", standard.cache_blocks),
        values.flag(context, parameters.PREFIX_CACHING, default=standard.prefix_caching),
        _context_length(context),
        lora.find(context),
        _draft(context, speculation.draft),
        speculation.lookup,
        speculation.guesses,
    )


def _draft(context: ModelContext, said: str) -> Path | None:
    if not said:
        return None
    directory = context.version_directory / said
    missing = [file for file in _FILES if not (directory / file).is_file()]
    if missing:
        raise Unavailable(
            f"parameter 'SPECULATIVE_MODEL' of model '{context.name}' is '{said}', and '{directory}' has no "
            f"{', '.join(missing)}"
        )
    return directory


def read_encoder(context: ModelContext, instance: InstanceContext, task: str) -> EncoderOptions:
    """Return what configuration and files say of a model that embeds or reranks. Raises ``NeriteError``."""
    check_files(context, task)
    own = _COMMON | _EMBEDDING if task == tasks.EMBED else _COMMON
    parameters.check(context, own, f"{_ENGINE}, of a model that is to {task},")
    device, properties = _device(context, instance)
    made = EncoderOptions(converted(context), device, properties, _context_length(context))
    if task != tasks.EMBED:
        return made
    return replace(made, pooling=_pooling(context), normalize=values.flag(context, "NORMALIZE", default=True))


def _pooling(context: ModelContext) -> str:
    said = context.parameter("POOLING_TYPE").upper()
    if not said:
        described = checkpoint.described(context.version_directory, _POOLING_FILE)
        said = next((name for mode, name in _POOLING_MODES.items() if described.get(mode)), "")
    if not said:
        said = "CLS"
        _log.warning(
            "model '%s' does not say how vectors of tokens become one: the first token's is taken. Say POOLING_TYPE "
            "MEAN, LAST or CLS, or copy %s of the checkpoint into %s",
            context.name,
            _POOLING_FILE,
            context.version_directory,
        )
    if said not in _POOLINGS:
        raise InvalidArgument(
            f"parameter 'POOLING_TYPE' of model '{context.name}' is '{said}'. There are: {', '.join(_POOLINGS)}."
        )
    return _POOLINGS[said]


def _device(context: ModelContext, instance: InstanceContext) -> tuple[str, Mapping[str, str | int]]:
    """Return where a model runs, and the properties that OpenVINO is given."""
    properties: dict[str, str | int] = {}
    threads = values.thread_count(context, "INFERENCE_NUM_THREADS")
    device = context.parameter("TARGET_DEVICE", "CPU").upper()
    if device == "CPU":
        properties = {
            "INFERENCE_NUM_THREADS": threads or len(instance.cores) or usable_cores(),
            "ENABLE_CPU_PINNING": "NO",
        }
    properties |= {name: context.parameter(name) for name in sorted(parameters.OF_OPENVINO) if context.parameter(name)}
    return device, properties


def _context_length(context: ModelContext) -> int:
    wanted, own = parameters.count(context, "MAX_MODEL_LEN"), _positions(context.version_directory)
    if own and wanted > own:
        raise InvalidArgument(
            f"parameter 'MAX_MODEL_LEN' of model '{context.name}' is {wanted}, and the model has {own} positions"
        )
    return wanted or own


def _positions(directory: Path) -> int:
    """Return how many positions a model has by its config.json; 0 where that does not say."""
    described = checkpoint.described(directory)
    inner = described.get("text_config")
    for place in (described, inner if isinstance(inner, dict) else {}):
        if isinstance(positions := place.get("max_position_embeddings"), int):
            return max(positions, 0)
    return 0
