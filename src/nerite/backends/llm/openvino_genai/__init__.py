"""The engine for CPUs: continuous batching and paged KV by OpenVINO GenAI."""

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.llm.openvino_genai import options
from nerite.backends.llm.openvino_genai.engine import OpenVinoGenAiEngine


def check(context: ModelContext) -> None:
    """Raise ``NeriteError`` if the version directory lacks what the engine needs."""
    options.check_files(context)


def engine(model: ModelContext, instance: InstanceContext) -> OpenVinoGenAiEngine:
    """Return an engine for an instance. Raises ``NeriteError``."""
    return OpenVinoGenAiEngine(options.read(model, instance))


__all__ = ["OpenVinoGenAiEngine", "check", "engine"]
