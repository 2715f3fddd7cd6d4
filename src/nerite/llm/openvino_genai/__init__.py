"""The engine for CPUs: OpenVINO GenAI's continuous batching with paged KV cache, and its other pipelines."""

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.llm import checkpoint
from nerite.llm.openvino_genai import options
from nerite.llm.openvino_genai.engine import OpenVinoGenAiEngine
from nerite.llm.openvino_genai.framework import OpenVinoClassifier, OpenVinoEmbedder, OpenVinoReranker
from nerite.llm.openvino_genai.image_generation import OpenVinoImageGenerator
from nerite.llm.openvino_genai.speech import OpenVinoSpeechSynthesizer, OpenVinoTranscriber


def check(context: ModelContext) -> None:
    """Raise ``NeriteError`` if the version directory lacks what the engine needs."""
    options.check_files(context, checkpoint.task_of(context))


def engine(model: ModelContext, instance: InstanceContext) -> OpenVinoGenAiEngine:
    """Return an engine for an instance. Raises ``NeriteError``."""
    return OpenVinoGenAiEngine(options.read(model, instance))


def embedder(model: ModelContext, instance: InstanceContext) -> OpenVinoEmbedder:
    """Load and return the embedder of an instance. Slow. Raises ``NeriteError``."""
    return OpenVinoEmbedder(options.read_encoder(model, instance, checkpoint.EMBED))


def reranker(model: ModelContext, instance: InstanceContext) -> OpenVinoReranker:
    """Load and return the reranker of an instance. Slow. Raises ``NeriteError``."""
    return OpenVinoReranker(options.read_encoder(model, instance, checkpoint.RERANK))


def classifier(model: ModelContext, instance: InstanceContext) -> OpenVinoClassifier:
    """Load and return the classifier of an instance. Slow. Raises ``NeriteError``."""
    return OpenVinoClassifier(options.read_encoder(model, instance, checkpoint.CLASSIFY))


def transcriber(model: ModelContext, instance: InstanceContext) -> OpenVinoTranscriber:
    """Load and return the transcriber of an instance. Slow. Raises ``NeriteError``."""
    return OpenVinoTranscriber(options.read_transcriber(model, instance))


def synthesizer(model: ModelContext, instance: InstanceContext) -> OpenVinoSpeechSynthesizer:
    """Load and return the synthesizer of an instance. Slow. Raises ``NeriteError``."""
    return OpenVinoSpeechSynthesizer(options.read_synthesizer(model, instance))


def image_generator(model: ModelContext, instance: InstanceContext) -> OpenVinoImageGenerator:
    """Load and return the image_generator of an instance. Slow. Raises ``NeriteError``."""
    return OpenVinoImageGenerator(options.read_image_generator(model, instance))


__all__ = [
    "OpenVinoClassifier",
    "OpenVinoEmbedder",
    "OpenVinoGenAiEngine",
    "OpenVinoImageGenerator",
    "OpenVinoReranker",
    "OpenVinoSpeechSynthesizer",
    "OpenVinoTranscriber",
    "check",
    "classifier",
    "embedder",
    "engine",
    "image_generator",
    "reranker",
    "synthesizer",
    "transcriber",
]
