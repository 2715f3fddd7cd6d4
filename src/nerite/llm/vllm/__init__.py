"""The engine for GPUs: vLLM, whose own scheduler batches. There is a build of it for processors, too."""

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.llm.vllm import framework
from nerite.llm.vllm.engine import VllmEngine


def check(context: ModelContext) -> None:
    """Raise ``NeriteError`` if files or configuration are not what the engine needs."""
    framework.read_arguments(context)


def engine(model: ModelContext, instance: InstanceContext) -> VllmEngine:
    """Return an engine for an instance. Raises ``NeriteError``."""
    return VllmEngine(framework.read_arguments(model, instance))


__all__ = ["VllmEngine", "check", "engine"]
