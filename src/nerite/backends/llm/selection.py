"""The engine of a model, found among those that are installed, and what has to be made for it before it runs.

The server decides, and has made what is missing (``prepared``). The worker then runs a Python that has the engine, and
comes to the same decision (``engine_of``).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Container
from pathlib import Path
from typing import Final, Protocol, cast

from nerite.backends import registry
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.llm import checkpoint, choice, conversion, installation, tasks
from nerite.backends.llm.checkpoint import Content
from nerite.backends.llm.choice import Choice
from nerite.backends.llm.embedding import Embedder
from nerite.backends.llm.engine import Engine
from nerite.backends.llm.parameters import ENGINE
from nerite.backends.llm.reranking import Reranker
from nerite.backends.python import environment_store
from nerite.core.errors import InvalidArgument, NotHere, Unavailable, Unsupported
from nerite.observability.gpus import driver_is_loaded

_log = logging.getLogger("nerite.backends.llm")

_GENERAL: Final = "llm"
"""The backend whose name is not that of an engine."""


class EngineModule(Protocol):
    """What the package of an engine offers."""

    def check(self, context: ModelContext) -> None:
        """Raise ``NeriteError`` if the files or the configuration of a model are not what the engine needs."""

    def engine(self, model: ModelContext, instance: InstanceContext) -> Engine:
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
    place = environment_store.folder(context.settings.get(environment_store.SETTING, ""))
    apart = {
        choice.VLLM: installation.found(installation.vllm(), place),
        choice.TENSORRT: installation.found(installation.TENSORRT_LLM, place),
    }
    installed = {engine for engine in choice.ENGINES if choice.here(engine) or apart.get(engine)}
    engine = _choice(context, backend, installed).engine
    if choice.here(engine):
        if engine == choice.OPENVINO:
            conversion.converted(context)
        return None
    if engine == choice.VLLM:
        return apart[engine] or installation.made(installation.vllm(), place)
    if apart.get(engine):
        return apart[engine]
    raise _lacking(engine)


def check(context: ModelContext, backend: str) -> None:
    """Raise ``NeriteError`` if no engine can run a model, or its files are not what the engine needs.

    An engine that is named need not be here.
    """
    _module(_choice(context, backend, _here()).engine).check(context)


def engine_of(context: ModelContext, backend: str) -> EngineModule:
    """Return the package of the engine that runs a model in this Python. Raises ``NeriteError``."""
    chosen = _choice(context, backend, _here())
    if not choice.here(chosen.engine):
        raise (
            registry.not_in_environment(context.name, chosen.engine) if context.environment else _lacking(chosen.engine)
        )
    _log.info("'%s': the engine is %s: %s", context.name, chosen.engine, chosen.why)
    return _module(chosen.engine)


def _here() -> frozenset[str]:
    return frozenset(engine for engine in choice.ENGINES if choice.here(engine))


def _module(engine: str) -> EngineModule:
    return cast(EngineModule, importlib.import_module(f"{__package__}.{engine}"))


def _choice(context: ModelContext, backend: str, installed: Container[str]) -> Choice:
    named, wanted = "" if backend == _GENERAL else backend, context.parameter(ENGINE)
    if named and wanted not in ("", named):
        raise InvalidArgument(
            f"model '{context.name}' has backend '{named}' and the parameter {ENGINE} '{wanted}': leave one out"
        )
    directory = context.version_directory
    content = checkpoint.content(directory)
    try:
        gpu, task = _may_use_gpus(context), tasks.task(context)
        chosen = choice.choose(content, wanted or named, installed, gpu=gpu, task=task)
    except (InvalidArgument, Unavailable) as error:
        raise error.prefixed(f"model '{context.name}': ") from None
    if content is Content.NOTHING:
        raise Unavailable(f"model '{context.name}': '{directory}' has no language model. It is {checkpoint.KINDS}")
    if chosen.engine == choice.TENSORRT and not driver_is_loaded():
        raise Unavailable(
            f"model '{context.name}': the engine {chosen.engine} needs an NVIDIA GPU, and this machine has no driver "
            f"for one. Choose {choice.OPENVINO} or {choice.VLLM}"
        )
    return chosen


def _may_use_gpus(context: ModelContext) -> bool:
    """Return whether there is a GPU for a model, and its configuration does not say that it is for processors."""
    kinds = {group.get("kind") for group in context.config.get("instance_group", ())}
    return driver_is_loaded() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and kinds != {"KIND_CPU"}


def _lacking(engine: str) -> Unsupported:
    return NotHere(f"the engine {engine} is not installed. Install it with: {choice.remedy(engine)}")
