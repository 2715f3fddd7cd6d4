"""The engine for CPUs: continuous batching and paged KV by OpenVINO GenAI."""

from nerite.backends.llm.openvino_genai.engine import OpenVinoGenAiEngine

__all__ = ["OpenVinoGenAiEngine"]
