"""The engine for CPUs: continuous batching and paged KV by OpenVINO GenAI, and its pipelines for models that read."""

from nerite.backends.llm.openvino_genai.encoders import OpenVinoEmbedder, OpenVinoReranker
from nerite.backends.llm.openvino_genai.engine import OpenVinoGenAiEngine

__all__ = ["OpenVinoEmbedder", "OpenVinoGenAiEngine", "OpenVinoReranker"]
