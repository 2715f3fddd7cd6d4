"""The engine for CPUs: continuous batching and paged KV by OpenVINO GenAI, and its pipelines for models that read."""

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.llm import tasks
from nerite.backends.llm.openvino_genai import options
from nerite.backends.llm.openvino_genai.encoders import OpenVinoEmbedder, OpenVinoReranker
from nerite.backends.llm.openvino_genai.engine import OpenVinoGenAiEngine


def check(context: ModelContext) -> None:
    """Raise ``NeriteError`` if the version directory lacks what the engine needs."""
    options.check_files(context, tasks.task(context))


def engine(model: ModelContext, instance: InstanceContext) -> OpenVinoGenAiEngine:
    """Return an engine for an instance. Raises ``NeriteError``."""
    return OpenVinoGenAiEngine(options.read(model, instance))


def embedder(model: ModelContext, instance: InstanceContext) -> OpenVinoEmbedder:
    """Return what embeds for an instance. Slow. Raises ``NeriteError``."""
    return OpenVinoEmbedder(options.read_encoder(model, instance, tasks.EMBED))


def reranker(model: ModelContext, instance: InstanceContext) -> OpenVinoReranker:
    """Return what reranks for an instance. Slow. Raises ``NeriteError``."""
    return OpenVinoReranker(options.read_encoder(model, instance, tasks.RERANK))


__all__ = ["OpenVinoEmbedder", "OpenVinoGenAiEngine", "OpenVinoReranker", "check", "embedder", "engine", "reranker"]
