"""Chooses the engine of a model among those that are installed, and prepares what the engine needs.

The server chooses and prepares (``prepared``). The worker then runs a Python that has the engine and makes the same
choice (``engine_of``). The parameters of language models are defined here, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol, cast

from nerite.backends import configuration, registry
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.python import environments
from nerite.config import model_parameters
from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument, NotInstalled, Unavailable, Unsupported
from nerite.llm import checkpoint, installation
from nerite.llm.checkpoint import CheckpointContent, task_of
from nerite.llm.classification import Classifier
from nerite.llm.embedding import Embedder, Reranker
from nerite.llm.engine import LlmEngine
from nerite.llm.image_generation import ImageGenerator
from nerite.llm.speech import SpeechSynthesizer, Transcriber
from nerite.observability.gpus import driver_is_loaded

EXTRA: Final = "nerite[llm]"
OPENVINO: Final = "openvino_genai"
VLLM: Final = "vllm"
TENSORRT: Final = "tensorrt_llm"
RESERVED_GPUS: Final = "NERITE_RAY_GPUS"
"""Environment variable with the GPUs that Ray has reserved for this server."""

_RUNS: Final[Mapping[str, frozenset[CheckpointContent]]] = {
    OPENVINO: frozenset({CheckpointContent.OPENVINO, CheckpointContent.CHECKPOINT, CheckpointContent.GGUF}),
    VLLM: frozenset({CheckpointContent.CHECKPOINT, CheckpointContent.ARGUMENTS}),
    TENSORRT: frozenset({CheckpointContent.CHECKPOINT}),
}
"""Content that each engine can run."""
ENGINES: Final = tuple(_RUNS)


class Choice(NamedTuple):
    """The chosen engine, and the reason."""

    engine: str
    why: str


def here(engine: str) -> bool:
    """Return whether an engine is installed in this Python."""
    return importlib.util.find_spec(engine) is not None


def remedy(engine: str) -> str:
    """Return the command that installs an engine."""
    if engine == OPENVINO:
        return f"pip install '{EXTRA}'"
    return (installation.TENSORRT_LLM if engine == TENSORRT else installation.vllm()).command


def choose(
    content: CheckpointContent, wanted: str, installed: Container[str], *, gpu: bool, task: str = checkpoint.GENERATE
) -> Choice:
    """Return the engine for a model: the configured one, or the best that is installed and can run it.

    Raises ``NeriteError`` with a remedy if no engine is suitable.
    """
    if task != checkpoint.GENERATE and wanted in ("", OPENVINO):
        return Choice(OPENVINO, f"no other engine has the task {task}")
    if wanted:
        return _wanted(content, wanted, task)
    if content is CheckpointContent.ARGUMENTS:
        return Choice(VLLM, "the model has arguments for it")
    if content is CheckpointContent.OPENVINO:
        return Choice(OPENVINO, "the model's files are OpenVINO's")
    if content is CheckpointContent.GGUF:
        return Choice(OPENVINO, "it reads GGUF files")
    # TensorRT-LLM comes last because the adapter for it has never been run.
    order = (VLLM, OPENVINO, TENSORRT) if gpu else (OPENVINO, VLLM)
    for engine in order:
        if engine in installed:
            return Choice(engine, _why(engine, order, gpu=gpu))
    ways = ", or ".join(remedy(engine) for engine in order[:2])
    raise NotInstalled(f"no engine for language models is installed. Install one with: {ways}")


def _wanted(content: CheckpointContent, wanted: str, task: str) -> Choice:
    if wanted not in _RUNS:
        meant = nearest(wanted, ENGINES)
        hint = f"Did you mean {meant}?" if meant else f"There are: {', '.join(ENGINES)}."
        raise InvalidArgument(f"'{wanted}' is not an engine. {hint}")
    if task != checkpoint.GENERATE:
        raise Unsupported(
            f"the engine {wanted} only generates text, but the task of the model is {task}: choose {OPENVINO}"
        )
    if content is not CheckpointContent.NOTHING and content not in _RUNS[wanted]:
        able = " or ".join(each.value for each in CheckpointContent if each in _RUNS[wanted])
        raise Unavailable(f"the engine {wanted} runs {able}, but the model has {content.value}")
    return Choice(wanted, "the configuration names it")


def _why(engine: str, order: tuple[str, ...], *, gpu: bool) -> str:
    machine = "there is a GPU" if gpu else "there is no GPU"
    if engine == order[0]:
        return machine
    return f"{machine}, and {order[0]} is not installed ({remedy(order[0])})"


# Parameters of language models: one set for all engines. Those that the chosen engine lacks are rejected by name.

ENGINE: Final = "ENGINE"
STEP_TIMEOUT: Final = "STEP_TIMEOUT_SECONDS"
PREFIX_CACHING: Final = "ENABLE_PREFIX_CACHING"
CACHE: Final = "KV_CACHE_GB"

OF_OPENVINO: Final = frozenset(
    {
        "CACHE_DIR",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        "ENABLE_CPU_PINNING",
        "EXECUTION_MODE_HINT",
        "INFERENCE_PRECISION_HINT",
        "KV_CACHE_PRECISION",
    }
)
"""Properties that are passed to OpenVINO unchanged."""
_FOR_ALL: Final = frozenset(
    {
        ENGINE,
        "EXECUTION_ENV_PATH",
        "EXECUTION_MODE",
        STEP_TIMEOUT,
        checkpoint.PARAMETER,
        model_parameters.PARAMETER,
        "WORKER",
    }
)
_DRAFT: Final = "SPECULATIVE_MODEL"
_LOOKUP: Final = "PROMPT_LOOKUP_MAX"
_GUESSES: Final = "NUM_SPECULATIVE_TOKENS"
SPECULATION: Final = frozenset({_DRAFT, _LOOKUP, _GUESSES})
OF_SOME: Final = frozenset(
    {
        *("MAX_MODEL_LEN", "MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS"),
        *(CACHE, "NUM_KV_BLOCKS", PREFIX_CACHING, "ENABLE_SLEEP_MODE"),
        *("PIPELINE_PARALLEL_SIZE", "TENSOR_PARALLEL_SIZE"),
        *("INFERENCE_NUM_THREADS", "TARGET_DEVICE", "WEIGHT_FORMAT"),
        *("NORMALIZE", "POOLING_TYPE", "WORD_TIMESTAMPS"),
        *OF_OPENVINO,
        *SPECULATION,
    }
)
"""Parameters that some engines support for some tasks."""
_CLOSE: Final = 0.8
_USUAL_GUESSES: Final = 5


class Speculation(NamedTuple):
    """Settings of speculative decoding; off if neither ``draft`` nor ``lookup`` is set."""

    draft: str = ""
    """Directory of the draft model, relative to the version directory."""
    lookup: int = 0
    """Prompt lookup instead of a draft model: length of the n-gram that must match."""
    guesses: int = _USUAL_GUESSES
    """Speculative tokens per step."""


def check_parameters(context: ModelContext, known: Collection[str], user: str) -> None:
    """Raise ``NeriteError`` for a parameter that ``user``, which supports the ``known`` ones, does not support.

    Unknown parameters are accepted because models may define their own, unless they resemble one of ours.
    """
    for key in context.config.get("parameters", {}):
        if key in known or key in _FOR_ALL:
            continue
        if key in OF_SOME:
            raise Unsupported(
                f"model '{context.name}' has the parameter '{key}', which {user} does not support: remove it, or "
                f"choose another {ENGINE}"
            )
        if meant := nearest(key.upper(), [*known, *_FOR_ALL], _CLOSE):
            raise InvalidArgument(f"model '{context.name}' has the parameter '{key}'. Did you mean {meant}?")


def count_parameter(context: ModelContext, key: str, default: int = 0) -> int:
    """Return a parameter that is a number above 0; ``default`` if it is not set. Raises ``InvalidArgument``."""
    number = configuration.parameter(context, key, str(default), configuration.integer_parameter, "a number above 0")
    if number < 1 and context.parameter(key):
        raise InvalidArgument(f"parameter '{key}' of model '{context.name}' is {number}; it must be above 0")
    return number


def speculation(context: ModelContext) -> Speculation:
    """Return the settings of speculative decoding. Raises ``InvalidArgument``."""
    made = Speculation(
        context.parameter(_DRAFT), count_parameter(context, _LOOKUP), count_parameter(context, _GUESSES, _USUAL_GUESSES)
    )
    if made.draft and made.lookup:
        raise InvalidArgument(f"model '{context.name}' has both {_DRAFT} and {_LOOKUP}: choose one")
    if context.parameter(_GUESSES) and not (made.draft or made.lookup):
        raise InvalidArgument(
            f"model '{context.name}' has {_GUESSES} but nothing that proposes tokens: set {_DRAFT} or {_LOOKUP}"
        )
    return made


_log = logging.getLogger("nerite.llm")

_GENERAL: Final = "llm"
"""The backend that leaves the choice of the engine open."""


class EngineModule(Protocol):
    """Interface of the package of an engine."""

    def check(self, context: ModelContext) -> None:
        """Raise ``NeriteError`` if the engine cannot run a model with these files and this configuration."""

    def engine(self, model: ModelContext, instance: InstanceContext) -> LlmEngine:
        """Return an engine for an instance, not yet started. Raises ``NeriteError``."""


class PipelineModule(Protocol):
    """Interface of the package of an engine that also has pipelines for models other than language models."""

    def embedder(self, model: ModelContext, instance: InstanceContext) -> Embedder:
        """Load and return the embedder of an instance. Slow. Raises ``NeriteError``."""

    def reranker(self, model: ModelContext, instance: InstanceContext) -> Reranker:
        """Load and return the reranker of an instance. Slow. Raises ``NeriteError``."""

    def classifier(self, model: ModelContext, instance: InstanceContext) -> Classifier:
        """Load and return the classifier of an instance. Slow. Raises ``NeriteError``."""

    def transcriber(self, model: ModelContext, instance: InstanceContext) -> Transcriber:
        """Load and return the transcriber of an instance. Slow. Raises ``NeriteError``."""

    def synthesizer(self, model: ModelContext, instance: InstanceContext) -> SpeechSynthesizer:
        """Load and return the synthesizer of an instance. Slow. Raises ``NeriteError``."""

    def image_generator(self, model: ModelContext, instance: InstanceContext) -> ImageGenerator:
        """Load and return the image generator of an instance. Slow. Raises ``NeriteError``."""


def prepared(context: ModelContext, backend: str) -> Path | None:
    """Build what the engine of a model needs; return the Python that has the engine, None for this one.

    Raises ``NeriteError``.
    """
    place = environments.environments_folder(context.settings.get(environments.SETTING, ""))
    separate = {
        VLLM: installation.found(installation.vllm(), place),
        TENSORRT: installation.found(installation.TENSORRT_LLM, place),
    }
    installed = {engine for engine in ENGINES if here(engine) or separate.get(engine)}
    engine = _choice(context, backend, installed).engine
    if here(engine):
        if engine == OPENVINO:
            installation.converted(context)
        return None
    if engine == VLLM:
        return separate[engine] or installation.made(installation.vllm(), place)
    if separate.get(engine):
        return separate[engine]
    raise _not_installed(engine)


def check_model(context: ModelContext, backend: str) -> None:
    """Raise ``NeriteError`` if no engine can run a model with its files and configuration.

    An engine that the configuration names need not be installed.
    """
    _module(_choice(context, backend, _here()).engine).check(context)


def engine_of(context: ModelContext, backend: str) -> EngineModule:
    """Return the package of the model's engine, which must be installed in this Python. Raises ``NeriteError``."""
    chosen = _choice(context, backend, _here())
    if not here(chosen.engine):
        if context.environment:
            raise registry.not_in_environment(context.name, chosen.engine)
        raise _not_installed(chosen.engine)
    _log.info("'%s': the engine is %s: %s", context.name, chosen.engine, chosen.why)
    return _module(chosen.engine)


def _here() -> frozenset[str]:
    return frozenset(engine for engine in ENGINES if here(engine))


def _module(engine: str) -> EngineModule:
    return cast(EngineModule, importlib.import_module(f"{__package__}.{engine}"))


def _choice(context: ModelContext, backend: str, installed: Container[str]) -> Choice:
    named, wanted = "" if backend == _GENERAL else backend, context.parameter(ENGINE)
    if named and wanted not in ("", named):
        raise InvalidArgument(
            f"model '{context.name}' has backend '{named}' and the parameter {ENGINE} '{wanted}': remove one"
        )
    directory = context.version_directory
    content = checkpoint.checkpoint_content(directory)
    try:
        gpu, task = _may_use_gpus(context), task_of(context)
        chosen = choose(content, wanted or named, installed, gpu=gpu, task=task)
    except (InvalidArgument, Unavailable) as error:
        raise error.prefixed(f"model '{context.name}': ") from None
    if content is CheckpointContent.NOTHING:
        raise Unavailable(f"model '{context.name}': '{directory}' holds no language model. Expected {checkpoint.KINDS}")
    if chosen.engine == TENSORRT and not driver_is_loaded():
        raise Unavailable(
            f"model '{context.name}': the engine {chosen.engine} needs an NVIDIA GPU, but this machine has no NVIDIA "
            f"driver. Choose {OPENVINO} or {VLLM}"
        )
    return chosen


def _may_use_gpus(context: ModelContext) -> bool:
    """Return whether a GPU is available and the model's configuration does not restrict the model to CPUs."""
    kinds = {group.get("kind") for group in context.config.get("instance_group", ())}
    return driver_is_loaded() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and kinds != {"KIND_CPU"}


def _not_installed(engine: str) -> Unsupported:
    return NotInstalled(f"the engine {engine} is not installed. Install it with: {remedy(engine)}")
