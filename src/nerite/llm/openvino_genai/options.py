"""Reads the options of a pipeline from the files of a version and the parameters of its configuration."""

from __future__ import annotations

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
from nerite.core.bounded_files import json_of
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported
from nerite.llm import checkpoint, selection
from nerite.llm.checkpoint import (
    CLASSIFY,
    EMBED,
    ENCODER_MODEL,
    GENERATE,
    PARTS,
    TEXT_TO_IMAGE,
    TEXT_TO_SPEECH,
    TRANSCRIBE,
    CheckpointContent,
)
from nerite.llm.installation import converted

# LoRA. The pipeline silently ignores adapters that requests choose and tensors that match no layer, and it does not
# know an adapter's scale. So one adapter applies to all requests, its tensors are compared with the model's layers, the
# scale is computed here, and unsupported settings of its configuration are rejected.

FILE: Final = "multi_lora.json"
"""Maps names of adapters to their directories, as in Triton's vLLM backend."""
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
"""Settings that the engine does not support, with the values that have no effect and are accepted."""


@dataclass(frozen=True)
class LoraAdapter:
    """A LoRA adapter of a model."""

    name: str
    file: Path
    scale: float
    """Factor of the product of its matrices."""


def find_lora(context: ModelContext) -> LoraAdapter | None:
    """Return the adapter of a model, or None. Raises ``NeriteError``."""
    place = context.version_directory / FILE
    if not place.is_file():
        return None
    named = checkpoint.describe_content(context.version_directory, FILE)
    if not named or not all(isinstance(path, str) and path for path in named.values()):
        raise InvalidArgument(f"model '{context.name}': '{place}' must map names of adapters to directories")
    if len(named) > 1:
        raise Unsupported(
            f"model '{context.name}' has {len(named)} adapters in {FILE} ({', '.join(sorted(named))}), but the engine "
            "openvino_genai supports one, for all requests: keep one, or create a model for each"
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
            raise Unsupported(f"{adapter} has '{key}' in {_CONFIG}, which the engine openvino_genai does not support")
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise InvalidArgument(f"{adapter} has no {_CONFIG} with 'r' and 'lora_alpha', which define its scale")
    return alpha / (math.sqrt(rank) if described.get("use_rslora") else rank)


def check_lora(adapter: LoraAdapter, layers: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` if a tensor of an adapter matches none of its model's ``layers``."""
    spellings = [spelling for layer in layers for spelling in (layer, layer.replace(".", "_"))]
    for tensor in _tensors(adapter.file):
        part = _PART.fullmatch(tensor)
        layer = part[1].removeprefix(_PREFIX) if part and part[1].startswith(_PREFIX) else ""
        if not layer or not any(layer in spelling for spelling in spellings):
            raise InvalidArgument(
                f"the adapter '{adapter.name}' has the tensor '{tensor}', for which the model has no layer: the "
                "adapter was made for another model"
            )


def _tensors(file: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises ``InvalidArgument`` if it is not a safetensors file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json_of(opened.read(min(size, file.stat().st_size)))
        return [name for name in header if name != "__metadata__"]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"'{file}' is not a safetensors file: {error}") from None


_log = logging.getLogger("nerite.llm")

MODEL: Final = "openvino_model.xml"
SEEING_MODEL: Final = "openvino_language_model.xml"
"""The language model file of a model that takes images, which has further files for them."""
_FILES: Final = (MODEL, "openvino_tokenizer.xml", "openvino_detokenizer.xml")
_SEEING_FILES: Final = (
    SEEING_MODEL,
    "openvino_text_embeddings_model.xml",
    "openvino_vision_embeddings_model.xml",
    *_FILES[1:],
)
_IMAGE_FILES: Final = (PARTS, "vae_decoder/openvino_model.xml")
_SPEECH_FILES: Final = (
    *(ENCODER_MODEL, "openvino_decoder_model.xml", "openvino_postnet.xml", "openvino_vocoder.xml"),
    _FILES[1],
)
_TRANSCRIBING_FILES: Final = (ENCODER_MODEL, "openvino_decoder_model.xml", *_FILES[1:], "preprocessor_config.json")

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
_WORDS: Final = "WORD_TIMESTAMPS"
_TRANSCRIBING: Final = frozenset(
    {"INFERENCE_NUM_THREADS", "TARGET_DEVICE", "WEIGHT_FORMAT", _WORDS, *selection.OF_OPENVINO}
)
_ENGINE: Final = "the engine openvino_genai"

_POOLINGS: Final = {"CLS": "CLS", "MEAN": "MEAN", "LAST": "LAST_TOKEN"}
"""The framework's names for vLLM's pooling types."""
_POOLING_FILE: Final = "1_Pooling/config.json"
_POOLING_MODES: Final = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}
"""Keys of the pooling file of Sentence Transformers."""


@dataclass(frozen=True)
class PipelineOptions:
    """Options of a pipeline that generates text."""

    name: str
    """Name of the instance."""
    directory: Path
    device: str = "CPU"
    properties: Mapping[str, str | int] | None = None
    max_sequences: int = 256
    batched_tokens: int = 256
    """Maximum number of tokens per step; a longer prompt takes several steps."""
    cache_gb: int = 4
    """Size of the KV cache, which is allocated on demand."""
    cache_blocks: int = 0
    """Used instead of ``cache_gb`` if it is above 0."""
    prefix_caching: bool = True
    context_length: int = 0
    """0: limited only by the model and the cache."""
    adapter: LoraAdapter | None = None
    """Adapter that applies to all requests."""
    draft: Path | None = None
    """Draft model that proposes tokens, which the model verifies in one step."""
    lookup: int = 0
    """Prompt lookup instead of a draft model: length of the n-gram that must match."""
    guesses: int = 5
    """Speculative tokens per step."""
    ends: frozenset[int] | None = None
    """Tokens by which the model ends its answer, beside the tokenizer's; None: those in ``directory``."""

    @property
    def speculates(self) -> bool:
        """Whether speculative decoding is on."""
        return self.draft is not None or self.lookup > 0

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return (self.directory / SEEING_MODEL).is_file()

    @property
    def model(self) -> Path:
        """Path of the network that generates tokens."""
        return self.directory / (SEEING_MODEL if self.sees else MODEL)


@dataclass(frozen=True)
class EncoderOptions:
    """Options of a pipeline for embeddings or for reranking."""

    directory: Path
    device: str
    properties: Mapping[str, str | int]
    context_length: int
    """Maximum number of tokens of a text; 0 if unknown."""
    pooling: str = "CLS"
    """Pooling of the tokens' vectors, by the framework's name."""
    normalize: bool = True
    """Whether vectors are normalized to length 1."""
    labels: Sequence[str] = ()
    """Names of the classes."""
    independent: bool = False
    """Whether a text may be of several classes."""


@dataclass(frozen=True)
class TranscriberOptions:
    """Options of a pipeline that transcribes speech."""

    name: str
    """Name of the model."""
    directory: Path
    device: str
    properties: Mapping[str, str | int]
    words: bool
    """Whether requests may ask for the times of words, which makes all of them slower."""


@dataclass(frozen=True)
class SpeechSynthesizerOptions:
    """Options of a pipeline that synthesizes speech."""

    name: str
    """Name of the model."""
    directory: Path
    device: str
    properties: Mapping[str, str | int]
    voices: Mapping[str, Path]
    """Files with the embeddings of voices, by their names."""
    longest: int
    """Maximum number of tokens of a text; 0 if unknown."""


@dataclass(frozen=True)
class ImageGeneratorOptions:
    """Options of a pipeline that generates images."""

    directory: Path
    device: str
    properties: Mapping[str, str | int]


def check_files(context: ModelContext, task: str) -> None:
    """Raise ``Unavailable`` with a remedy if the version directory lacks files that the task needs."""
    directory = context.version_directory
    if checkpoint.checkpoint_content(directory) in (CheckpointContent.CHECKPOINT, CheckpointContent.GGUF):
        return  # its conversion creates all files
    needed: Sequence[str] = _FILES if task == GENERATE else _FILES[:2]
    if task == GENERATE and (directory / SEEING_MODEL).is_file():
        needed = _SEEING_FILES
    if task == TRANSCRIBE:
        needed = _TRANSCRIBING_FILES
    if task == TEXT_TO_SPEECH:
        needed = _SPEECH_FILES
    if task == TEXT_TO_IMAGE:
        needed = _IMAGE_FILES
    missing = [file for file in needed if not (directory / file).is_file()]
    if not missing:
        return
    raise Unavailable(
        f"model '{context.name}': '{directory}' has no {', '.join(missing)}. A language model must be a directory that "
        "was written by 'optimum-cli export openvino'"
    )


def read(context: ModelContext, instance: InstanceContext) -> PipelineOptions:
    """Read the options; convert the checkpoint if that was not done before. Raises ``NeriteError``."""
    check_files(context, GENERATE)
    selection.check_parameters(context, KNOWN, _ENGINE)
    standard = PipelineOptions(instance.name, converted(context))
    version = context.version_directory.absolute()
    device, properties = _device(context, instance)
    speculation = selection.speculation(context)
    return PipelineOptions(
        instance.name,
        standard.directory,
        device,
        properties,
        selection.count_parameter(context, "MAX_NUM_SEQS", standard.max_sequences),
        selection.count_parameter(context, "MAX_NUM_BATCHED_TOKENS", standard.batched_tokens),
        selection.count_parameter(context, selection.CACHE, standard.cache_gb),
        selection.count_parameter(context, "NUM_KV_BLOCKS", standard.cache_blocks),
        configuration.flag(context, selection.PREFIX_CACHING, default=standard.prefix_caching),
        _context_length(context),
        find_lora(context),
        _draft(context, speculation.draft),
        speculation.lookup,
        speculation.guesses,
        None if standard.directory == version else checkpoint.end_tokens(version),
    )


def _draft(context: ModelContext, configured: str) -> Path | None:
    if not configured:
        return None
    directory = context.version_directory / configured
    missing = [file for file in _FILES if not (directory / file).is_file()]
    if missing:
        raise Unavailable(
            f"parameter 'SPECULATIVE_MODEL' of model '{context.name}' is '{configured}', but '{directory}' has no "
            f"{', '.join(missing)}"
        )
    return directory


def read_encoder(context: ModelContext, instance: InstanceContext, task: str) -> EncoderOptions:
    """Read the options of a model that embeds, reranks or classifies. Raises ``NeriteError``."""
    check_files(context, task)
    own = _COMMON | _EMBEDDING if task == EMBED else _COMMON
    selection.check_parameters(context, own, f"{_ENGINE}, for the task {task},")
    device, properties = _device(context, instance)
    made = EncoderOptions(converted(context), device, properties, _context_length(context))
    if task == CLASSIFY:
        kind = checkpoint.describe_content(context.version_directory).get("problem_type")
        if kind == "regression":
            raise Unsupported(f"model '{context.name}' predicts numbers, and no classes: set TASK to rerank")
        several = kind == "multi_label_classification"
        return replace(made, labels=checkpoint.labels_of(context.version_directory), independent=several)
    if task != EMBED:
        return made
    return replace(made, pooling=_pooling(context), normalize=configuration.flag(context, "NORMALIZE", default=True))


def read_transcriber(context: ModelContext, instance: InstanceContext) -> TranscriberOptions:
    """Read the options of a model that transcribes. Raises ``NeriteError``."""
    check_files(context, TRANSCRIBE)
    selection.check_parameters(context, _TRANSCRIBING, f"{_ENGINE}, for the task {TRANSCRIBE},")
    device, properties = _device(context, instance)
    words = configuration.flag(context, _WORDS, default=False)
    return TranscriberOptions(context.name, converted(context), device, properties, words)


def read_synthesizer(context: ModelContext, instance: InstanceContext) -> SpeechSynthesizerOptions:
    """Read the options of a model that synthesizes speech. Raises ``NeriteError``."""
    check_files(context, TEXT_TO_SPEECH)
    selection.check_parameters(
        context, _TRANSCRIBING - {_WORDS}, f"{_ENGINE}, for a model that is to {TEXT_TO_SPEECH},"
    )
    directory = context.version_directory
    device, properties = _device(context, instance)
    voices = {file.stem: file for file in sorted((directory / "voices").glob("*.bin"))}
    longest = checkpoint.describe_content(directory).get("max_text_positions")
    most = longest if isinstance(longest, int) and longest > 0 else 0
    return SpeechSynthesizerOptions(context.name, directory, device, properties, voices, most)


def read_image_generator(context: ModelContext, instance: InstanceContext) -> ImageGeneratorOptions:
    """Read the options of a model that generates images. Raises ``NeriteError``."""
    check_files(context, TEXT_TO_IMAGE)
    selection.check_parameters(context, _TRANSCRIBING - {_WORDS}, f"{_ENGINE}, for the task {TEXT_TO_IMAGE},")
    return ImageGeneratorOptions(context.version_directory, *_device(context, instance))


def _pooling(context: ModelContext) -> str:
    pooling = context.parameter("POOLING_TYPE").upper()
    if not pooling:
        described = checkpoint.describe_content(context.version_directory, _POOLING_FILE)
        pooling = next((name for mode, name in _POOLING_MODES.items() if described.get(mode)), "")
    if not pooling:
        pooling = "CLS"
        _log.warning(
            "model '%s' does not specify its pooling, so the vector of the first token is used. Set POOLING_TYPE to "
            "MEAN, LAST or CLS, or copy %s from the checkpoint to %s",
            context.name,
            _POOLING_FILE,
            context.version_directory,
        )
    if pooling not in _POOLINGS:
        raise InvalidArgument(
            f"parameter 'POOLING_TYPE' of model '{context.name}' is '{pooling}'. There are: {', '.join(_POOLINGS)}."
        )
    return _POOLINGS[pooling]


def _device(context: ModelContext, instance: InstanceContext) -> tuple[str, Mapping[str, str | int]]:
    """Return the device of a model, and the properties for OpenVINO."""
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
            f"parameter 'MAX_MODEL_LEN' of model '{context.name}' is {wanted}, but the model has {own} positions"
        )
    return wanted or own


def _positions(directory: Path) -> int:
    """Return the number of positions in a model's config.json; 0 if it does not specify it."""
    described = checkpoint.describe_content(directory)
    inner = described.get("text_config")
    for place in (described, inner if isinstance(inner, dict) else {}):
        if isinstance(positions := place.get("max_position_embeddings"), int):
            return max(positions, 0)
    return 0
