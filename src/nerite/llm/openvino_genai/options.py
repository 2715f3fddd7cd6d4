"""How the pipeline of a model has to be made: from the files of its version and the parameters of its configuration."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nerite.backends import configuration
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import usable_cores
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported
from nerite.llm import checkpoint, selection
from nerite.llm.checkpoint import EMBED, GENERATE, CheckpointContent
from nerite.llm.installation import converted

# LoRA: one adapter beside the model, which all requests are answered with.
#
# The pipeline ignores in silence the adapters that requests choose, and tensors that fit no layer; and it knows
# nothing of how far an adapter is to count. So there is one for all, its file is compared with the layers of the
# model, and what its configuration says beyond that is refused.

FILE: Final = "multi_lora.json"
"""As Triton's vLLM backend has it: names of adapters, and where each lies."""
_WEIGHTS: Final = "adapter_model.safetensors"
_CONFIG: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
_PART: Final = re.compile(r"(.+)[_.]lora[_.](?:A|B|up|down)\.weight")
_PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "peft_type": (None, "LORA"),
    "rank_pattern": (None, {}),
    "use_dora": (None, False),
}
"""What the engine would not do, and the values that ask for nothing."""


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter that lies beside a model."""

    name: str
    file: Path
    scale: float
    """What its product is multiplied with."""


def find_lora(context: ModelContext) -> LoraAdapter | None:
    """Return the adapter of a model; None if it has none. Raises ``NeriteError``."""
    place = context.version_directory / FILE
    if not place.is_file():
        return None
    named = checkpoint.describe_content(context.version_directory, FILE)
    if not named or not all(isinstance(path, str) and path for path in named.values()):
        raise InvalidArgument(f"model '{context.name}': '{place}' has to be names of adapters and their directories")
    if len(named) > 1:
        raise Unsupported(
            f"model '{context.name}' has {len(named)} adapters in {FILE} ({', '.join(sorted(named))}), and the engine "
            "openvino_genai takes one, for all requests: leave one there, or make a model of each"
        )
    ((name, path),) = named.items()
    directory = context.version_directory / path
    file = directory / _WEIGHTS
    if not file.is_file():
        raise Unavailable(f"model '{context.name}': the adapter '{name}' of {FILE} has no '{file}'")
    return LoraAdapter(name, file, _scale(f"model '{context.name}': the adapter '{name}'", directory))


def _scale(adapter: str, directory: Path) -> float:
    described = checkpoint.describe_content(directory, _CONFIG)
    for key, plain in _PLAIN.items():
        if described.get(key) not in plain:
            raise Unsupported(f"{adapter} has '{key}' in {_CONFIG}, which the engine openvino_genai does not do")
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise InvalidArgument(f"{adapter} has no {_CONFIG} with 'r' and 'lora_alpha', which say how far it counts")
    return alpha / (math.sqrt(rank) if described.get("use_rslora") else rank)


def check_lora(adapter: LoraAdapter, layers: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` if a tensor of an adapter belongs to none of the ``layers`` of its model."""
    spellings = [spelling for layer in layers for spelling in (layer, layer.replace(".", "_"))]
    for tensor in _tensors(adapter.file):
        part = _PART.fullmatch(tensor)
        layer = part[1].removeprefix(_PREFIX) if part and part[1].startswith(_PREFIX) else ""
        if not layer or not any(layer in spelling for spelling in spellings):
            raise InvalidArgument(
                f"the adapter '{adapter.name}' has the tensor '{tensor}', for which the model has no layer: it was "
                "made for another model"
            )


def _tensors(file: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises ``InvalidArgument`` if it is not in the format safetensors."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(size, file.stat().st_size)))
        return [name for name in header if name != "__metadata__"]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"'{file}' is no file of the format safetensors: {error}") from None


_log = logging.getLogger("nerite.llm")

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
    {"INFERENCE_NUM_THREADS", "MAX_MODEL_LEN", "TARGET_DEVICE", "WEIGHT_FORMAT", *selection.OF_OPENVINO}
)
KNOWN: Final = frozenset(
    {
        *_COMMON,
        *("MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS", "NUM_KV_BLOCKS"),
        *(selection.CACHE, selection.PREFIX_CACHING),
        *selection.SPECULATION,
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
class PipelineOptions:
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
    if checkpoint.checkpoint_content(directory) is CheckpointContent.CHECKPOINT:
        return  # What it is converted to has everything.
    needed: Sequence[str] = _FILES if task == GENERATE else _FILES[:2]
    if task == GENERATE and (directory / SEEING_MODEL).is_file():
        needed = _SEEING_FILES
    missing = [file for file in needed if not (directory / file).is_file()]
    if not missing:
        return
    raise Unavailable(
        f"model '{context.name}': '{directory}' has no {', '.join(missing)}. A language model is a directory that "
        "'optimum-cli export openvino' has made"
    )


def read(context: ModelContext, instance: InstanceContext) -> PipelineOptions:
    """Return what configuration and files say; convert a checkpoint, if that was not done. Raises ``NeriteError``."""
    check_files(context, GENERATE)
    selection.check_parameters(context, KNOWN, _ENGINE)
    standard = PipelineOptions(instance.name, converted(context))
    device, properties = _device(context, instance)
    speculation = selection.speculation(context)
    return PipelineOptions(
        instance.name,
        standard.directory,
        device,
        properties,
        selection.count_parameter(context, "MAX_NUM_SEQS", standard.most_sequences),
        selection.count_parameter(context, "MAX_NUM_BATCHED_TOKENS", standard.batched_tokens),
        selection.count_parameter(context, selection.CACHE, standard.cache_gb),
        selection.count_parameter(context, "NUM_KV_BLOCKS", standard.cache_blocks),
        configuration.flag(context, selection.PREFIX_CACHING, default=standard.prefix_caching),
        _context_length(context),
        find_lora(context),
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
    own = _COMMON | _EMBEDDING if task == EMBED else _COMMON
    selection.check_parameters(context, own, f"{_ENGINE}, of a model that is to {task},")
    device, properties = _device(context, instance)
    made = EncoderOptions(converted(context), device, properties, _context_length(context))
    if task != EMBED:
        return made
    return replace(made, pooling=_pooling(context), normalize=configuration.flag(context, "NORMALIZE", default=True))


def _pooling(context: ModelContext) -> str:
    said = context.parameter("POOLING_TYPE").upper()
    if not said:
        described = checkpoint.describe_content(context.version_directory, _POOLING_FILE)
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
    threads = configuration.thread_count(context, "INFERENCE_NUM_THREADS")
    device = context.parameter("TARGET_DEVICE", "CPU").upper()
    if device == "CPU":
        properties = {
            "INFERENCE_NUM_THREADS": threads or len(instance.cores) or usable_cores(),
            "ENABLE_CPU_PINNING": "NO",
        }
    properties |= {name: context.parameter(name) for name in sorted(selection.OF_OPENVINO) if context.parameter(name)}
    return device, properties


def _context_length(context: ModelContext) -> int:
    wanted, own = selection.count_parameter(context, "MAX_MODEL_LEN"), _positions(context.version_directory)
    if own and wanted > own:
        raise InvalidArgument(
            f"parameter 'MAX_MODEL_LEN' of model '{context.name}' is {wanted}, and the model has {own} positions"
        )
    return wanted or own


def _positions(directory: Path) -> int:
    """Return how many positions a model has by its config.json; 0 where that does not say."""
    described = checkpoint.describe_content(directory)
    inner = described.get("text_config")
    for place in (described, inner if isinstance(inner, dict) else {}):
        if isinstance(positions := place.get("max_position_embeddings"), int):
            return max(positions, 0)
    return 0
