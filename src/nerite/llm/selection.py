"""The engine of a model, found among those that are installed, and what has to be made for it before it runs.

The server decides, and has made what is missing (``prepared``). The worker then runs a Python that has the engine, and
comes to the same decision (``engine_of``).
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
from nerite.core.errors import InvalidArgument, NotHere, Unavailable, Unsupported
from nerite.llm import checkpoint, installation
from nerite.llm.checkpoint import CheckpointContent, task_of
from nerite.llm.embedding import Embedder, Reranker
from nerite.llm.engine import LlmEngine
from nerite.observability.gpus import driver_is_loaded

# Which engine runs a model, and why. Pure, but for the look at what is installed.

EXTRA: Final = "nerite[llm]"
OPENVINO: Final = "openvino_genai"
VLLM: Final = "vllm"
TENSORRT: Final = "tensorrt_llm"

_RUNS: Final[Mapping[str, frozenset[CheckpointContent]]] = {
    OPENVINO: frozenset({CheckpointContent.OPENVINO, CheckpointContent.CHECKPOINT}),
    VLLM: frozenset({CheckpointContent.CHECKPOINT, CheckpointContent.ARGUMENTS}),
    TENSORRT: frozenset({CheckpointContent.CHECKPOINT}),
}
"""What each engine can be given."""
ENGINES: Final = tuple(_RUNS)


class Choice(NamedTuple):
    """The engine of a model."""

    engine: str
    why: str


def here(engine: str) -> bool:
    """Return whether this Python has an engine."""
    return importlib.util.find_spec(engine) is not None


def remedy(engine: str) -> str:
    """Return the command that brings an engine."""
    if engine == OPENVINO:
        return f"pip install '{EXTRA}'"
    return (installation.TENSORRT_LLM if engine == TENSORRT else installation.vllm()).command


def choose(
    content: CheckpointContent, wanted: str, installed: Container[str], *, gpu: bool, task: str = checkpoint.GENERATE
) -> Choice:
    """Return the engine for a model: the one that is wanted, else the best that is installed and can run it.

    Raises ``NeriteError`` where there is none, with what to do.
    """
    if task != checkpoint.GENERATE and wanted in ("", OPENVINO):
        return Choice(OPENVINO, f"no other one can {task}")
    if wanted:
        return _wanted(content, wanted, task)
    if content is CheckpointContent.ARGUMENTS:
        return Choice(VLLM, "the model has arguments for it")
    if content is CheckpointContent.OPENVINO:
        return Choice(OPENVINO, "the model's files are OpenVINO's")
    # TensorRT-LLM last: nobody has run ours with it yet.
    order = (VLLM, OPENVINO, TENSORRT) if gpu else (OPENVINO, VLLM)
    for engine in order:
        if engine in installed:
            return Choice(engine, _why(engine, order, gpu=gpu))
    ways = ", or ".join(remedy(engine) for engine in order[:2])
    raise NotHere(f"no engine for language models is installed. Install one with: {ways}")


def _wanted(content: CheckpointContent, wanted: str, task: str) -> Choice:
    if wanted not in _RUNS:
        meant = nearest(wanted, ENGINES)
        hint = f"Did you mean {meant}?" if meant else f"There are: {', '.join(ENGINES)}."
        raise InvalidArgument(f"'{wanted}' is no engine. {hint}")
    if task != checkpoint.GENERATE:
        raise Unsupported(f"the engine {wanted} generates text here, and the model is to {task}: choose {OPENVINO}")
    if content is not CheckpointContent.NOTHING and content not in _RUNS[wanted]:
        able = " or ".join(each.value for each in CheckpointContent if each in _RUNS[wanted])
        raise Unavailable(f"the engine {wanted} runs {able}, and there is {content.value}")
    return Choice(wanted, "the configuration names it")


def _why(engine: str, order: tuple[str, ...], *, gpu: bool) -> str:
    machine = "there is a GPU" if gpu else "there is no GPU"
    if engine == order[0]:
        return machine
    return f"{machine}, and {order[0]} is not installed ({remedy(order[0])})"


# The parameters of language models, which are one set for all engines: what an engine has not is refused by name.

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
"""Properties of OpenVINO, which are handed on to it as they are."""
_OF_ALL: Final = frozenset(
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
        *(CACHE, "NUM_KV_BLOCKS", PREFIX_CACHING),
        *("PIPELINE_PARALLEL_SIZE", "TENSOR_PARALLEL_SIZE"),
        *("INFERENCE_NUM_THREADS", "TARGET_DEVICE", "WEIGHT_FORMAT"),
        *("NORMALIZE", "POOLING_TYPE"),
        *OF_OPENVINO,
        *SPECULATION,
    }
)
"""What one engine has, for one task, and another may have not."""
_CLOSE: Final = 0.8
_USUAL_GUESSES: Final = 5


class Speculation(NamedTuple):
    """How tokens are guessed ahead, if they are."""

    draft: str = ""
    """The directory of a smaller model, seen from the version directory."""
    lookup: int = 0
    """Instead of it: tokens that have to be the same for a guess from the text so far."""
    guesses: int = _USUAL_GUESSES
    """Tokens that are guessed at a time."""


def check_parameters(context: ModelContext, known: Collection[str], user: str) -> None:
    """Raise ``NeriteError`` for a parameter that means nothing to ``user``, who has those that are ``known``.

    What nobody here knows may be somebody else's, unless it is nearly one of ours.
    """
    for key in context.config.get("parameters", {}):
        if key in known or key in _OF_ALL:
            continue
        if key in OF_SOME:
            raise Unsupported(
                f"model '{context.name}' has the parameter '{key}', which {user} does not have: take it out, or "
                f"choose another {ENGINE}"
            )
        if meant := nearest(key.upper(), [*known, *_OF_ALL], _CLOSE):
            raise InvalidArgument(f"model '{context.name}' has the parameter '{key}'. Did you mean {meant}?")


def count_parameter(context: ModelContext, key: str, default: int = 0) -> int:
    """Return a parameter that is a number above 0; ``default`` where it does not say. Raises ``InvalidArgument``."""
    number = configuration.parameter(context, key, str(default), configuration.integer_parameter, "a number above 0")
    if number < 1 and context.parameter(key):
        raise InvalidArgument(f"parameter '{key}' of model '{context.name}' is {number}; it has to be above 0")
    return number


def speculation(context: ModelContext) -> Speculation:
    """Return how tokens are to be guessed. Raises ``InvalidArgument``."""
    made = Speculation(
        context.parameter(_DRAFT), count_parameter(context, _LOOKUP), count_parameter(context, _GUESSES, _USUAL_GUESSES)
    )
    if made.draft and made.lookup:
        raise InvalidArgument(f"model '{context.name}' has {_DRAFT} and {_LOOKUP}: choose one")
    if context.parameter(_GUESSES) and not (made.draft or made.lookup):
        raise InvalidArgument(
            f"model '{context.name}' has {_GUESSES} and nothing that guesses tokens: say {_DRAFT}, or {_LOOKUP}"
        )
    return made


_log = logging.getLogger("nerite.llm")

_GENERAL: Final = "llm"
"""The backend whose name is not that of an engine."""


class EngineModule(Protocol):
    """What the package of an engine offers."""

    def check(self, context: ModelContext) -> None:
        """Raise ``NeriteError`` if the files or the configuration of a model are not what the engine needs."""

    def engine(self, model: ModelContext, instance: InstanceContext) -> LlmEngine:
        """Return an engine for an instance, not started yet. Raises ``NeriteError``."""


class ReaderModule(Protocol):
    """What the package of an engine offers whose models may read alone."""

    def embedder(self, model: ModelContext, instance: InstanceContext) -> Embedder:
        """Return what embeds for an instance. Slow. Raises ``NeriteError``."""

    def reranker(self, model: ModelContext, instance: InstanceContext) -> Reranker:
        """Return what reranks for an instance. Slow. Raises ``NeriteError``."""


def prepared(context: ModelContext, backend: str) -> Path | None:
    """Have made what the engine of a model needs; return the Python that has the engine, None for this one.

    Raises ``NeriteError``.
    """
    place = environments.environments_folder(context.settings.get(environments.SETTING, ""))
    apart = {
        VLLM: installation.found(installation.vllm(), place),
        TENSORRT: installation.found(installation.TENSORRT_LLM, place),
    }
    installed = {engine for engine in ENGINES if here(engine) or apart.get(engine)}
    engine = _choice(context, backend, installed).engine
    if here(engine):
        if engine == OPENVINO:
            installation.converted(context)
        return None
    if engine == VLLM:
        return apart[engine] or installation.made(installation.vllm(), place)
    if apart.get(engine):
        return apart[engine]
    raise _lacking(engine)


def check_model(context: ModelContext, backend: str) -> None:
    """Raise ``NeriteError`` if no engine can run a model, or its files are not what the engine needs.

    An engine that is named need not be here.
    """
    _module(_choice(context, backend, _here()).engine).check(context)


def engine_of(context: ModelContext, backend: str) -> EngineModule:
    """Return the package of the engine that runs a model in this Python. Raises ``NeriteError``."""
    chosen = _choice(context, backend, _here())
    if not here(chosen.engine):
        raise (
            registry.not_in_environment(context.name, chosen.engine) if context.environment else _lacking(chosen.engine)
        )
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
            f"model '{context.name}' has backend '{named}' and the parameter {ENGINE} '{wanted}': leave one out"
        )
    directory = context.version_directory
    content = checkpoint.checkpoint_content(directory)
    try:
        gpu, task = _may_use_gpus(context), task_of(context)
        chosen = choose(content, wanted or named, installed, gpu=gpu, task=task)
    except (InvalidArgument, Unavailable) as error:
        raise error.prefixed(f"model '{context.name}': ") from None
    if content is CheckpointContent.NOTHING:
        raise Unavailable(f"model '{context.name}': '{directory}' has no language model. It is {checkpoint.KINDS}")
    if chosen.engine == TENSORRT and not driver_is_loaded():
        raise Unavailable(
            f"model '{context.name}': the engine {chosen.engine} needs an NVIDIA GPU, and this machine has no driver "
            f"for one. Choose {OPENVINO} or {VLLM}"
        )
    return chosen


def _may_use_gpus(context: ModelContext) -> bool:
    """Return whether there is a GPU for a model, and its configuration does not say that it is for processors."""
    kinds = {group.get("kind") for group in context.config.get("instance_group", ())}
    return driver_is_loaded() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and kinds != {"KIND_CPU"}


def _lacking(engine: str) -> Unsupported:
    return NotHere(f"the engine {engine} is not installed. Install it with: {remedy(engine)}")
