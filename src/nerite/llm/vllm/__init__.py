"""The engine vLLM, whose own scheduler does the batching. Mainly for GPUs, but builds for CPUs exist, too."""

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.llm.vllm import framework
from nerite.llm.vllm.engine import VllmEngine


def check(context: ModelContext) -> None:
    """Raise ``NeriteError`` if the engine cannot run a model with its files and configuration."""
    framework.read_arguments(context)


def engine(model: ModelContext, instance: InstanceContext) -> VllmEngine:
    """Return an engine for an instance. Raises ``NeriteError``."""
    return VllmEngine(framework.read_arguments(model, instance))


__all__ = ["VllmEngine", "check", "engine"]
