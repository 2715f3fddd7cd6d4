"""Which engine runs a model, and why. Pure, but for the look at what is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Mapping
from typing import Final, NamedTuple

from nerite.backends.llm import installation, tasks
from nerite.backends.llm.checkpoint import Content
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument, NotHere, Unavailable, Unsupported

EXTRA: Final = "nerite[llm]"
OPENVINO: Final = "openvino_genai"
VLLM: Final = "vllm"
TENSORRT: Final = "tensorrt_llm"

_RUNS: Final[Mapping[str, frozenset[Content]]] = {
    OPENVINO: frozenset({Content.OPENVINO, Content.CHECKPOINT}),
    VLLM: frozenset({Content.CHECKPOINT, Content.ARGUMENTS}),
    TENSORRT: frozenset({Content.CHECKPOINT}),
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
    content: Content, wanted: str, installed: Container[str], *, gpu: bool, task: str = tasks.GENERATE
) -> Choice:
    """Return the engine for a model: the one that is wanted, else the best that is installed and can run it.

    Raises ``NeriteError`` where there is none, with what to do.
    """
    if task != tasks.GENERATE and wanted in ("", OPENVINO):
        return Choice(OPENVINO, f"no other one can {task}")
    if wanted:
        return _wanted(content, wanted, task)
    if content is Content.ARGUMENTS:
        return Choice(VLLM, "the model has arguments for it")
    if content is Content.OPENVINO:
        return Choice(OPENVINO, "the model's files are OpenVINO's")
    # TensorRT-LLM last: nobody has run ours with it yet.
    order = (VLLM, OPENVINO, TENSORRT) if gpu else (OPENVINO, VLLM)
    for engine in order:
        if engine in installed:
            return Choice(engine, _why(engine, order, gpu=gpu))
    ways = ", or ".join(remedy(engine) for engine in order[:2])
    raise NotHere(f"no engine for language models is installed. Install one with: {ways}")


def _wanted(content: Content, wanted: str, task: str) -> Choice:
    if wanted not in _RUNS:
        meant = nearest(wanted, ENGINES)
        hint = f"Did you mean {meant}?" if meant else f"There are: {', '.join(ENGINES)}."
        raise InvalidArgument(f"'{wanted}' is no engine. {hint}")
    if task != tasks.GENERATE:
        raise Unsupported(f"the engine {wanted} generates text here, and the model is to {task}: choose {OPENVINO}")
    if content is not Content.NOTHING and content not in _RUNS[wanted]:
        able = " or ".join(each.value for each in Content if each in _RUNS[wanted])
        raise Unavailable(f"the engine {wanted} runs {able}, and there is {content.value}")
    return Choice(wanted, "the configuration names it")


def _why(engine: str, order: tuple[str, ...], *, gpu: bool) -> str:
    machine = "there is a GPU" if gpu else "there is no GPU"
    if engine == order[0]:
        return machine
    return f"{machine}, and {order[0]} is not installed ({remedy(order[0])})"
