"""The engine for GPUs: vLLM, whose own scheduler batches. There is a build of it for processors, too."""

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.llm.vllm import arguments
from nerite.backends.llm.vllm.engine import VllmEngine


def check(context: ModelContext) -> None:
    """Raise ``NeriteError`` if files or configuration are not what the engine needs."""
    arguments.read(context)


def engine(model: ModelContext, instance: InstanceContext) -> VllmEngine:
    """Return an engine for an instance. Raises ``NeriteError``."""
    return VllmEngine(arguments.read(model, instance))


__all__ = ["VllmEngine", "check", "engine"]
