"""TensorRT-LLM by its LLM API, for GPUs. Written to its documentation, and not run yet: see docs/llm.md."""

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.llm.tensorrt_llm import arguments
from nerite.backends.llm.tensorrt_llm.engine import TensorRtLlmEngine


def check(context: ModelContext) -> None:
    """Raise ``NeriteError`` if the configuration is not what the engine needs."""
    arguments.read(context)


def engine(model: ModelContext, instance: InstanceContext) -> TensorRtLlmEngine:
    """Return an engine for an instance. Raises ``NeriteError``."""
    return TensorRtLlmEngine(arguments.read(model), instance)


__all__ = ["TensorRtLlmEngine", "check", "engine"]
