"""LiteRT, which was TensorFlow Lite: a flat buffer with a magic word."""

from __future__ import annotations

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate
from nerite.config.model_config import ModelConfig


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a LiteRT model."""
    if candidate.head[4:8] != b"TFL3":
        if candidate.suffix == ".tflite":
            remedy = "Convert the model again: tf.lite.TFLiteConverter, or ai_edge_torch.convert"
            raise Unusable(candidate.path, "this is no LiteRT model: the word TFL3 is not at its beginning", remedy)
        return None
    config = ModelConfig(backend="litert")
    return Artifact("LiteRT model", candidate.path, candidate.name, config, {"model.tflite": candidate.path})
