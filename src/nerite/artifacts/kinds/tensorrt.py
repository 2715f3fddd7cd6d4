"""TensorRT engines, and those of TensorRT-LLM. They are laid out as Triton has them."""

from __future__ import annotations

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate
from nerite.config.model_config import ModelConfig

_BOUND = "It runs with the TensorRT version, and on the kind of GPU, that it was built with."
_SUFFIXES = (".plan", ".engine", ".trt")


def recognise(candidate: Candidate) -> Artifact | None:
    """Return an engine, or the directory of a language model's engines."""
    if candidate.is_directory:
        return _language_model(candidate)
    if candidate.head.startswith(b"ftrt"):
        config = ModelConfig(backend="tensorrt", platform="tensorrt_plan")
        files = {"model.plan": candidate.path}
        return Artifact("TensorRT engine", candidate.path, candidate.name, config, files, remarks=(_BOUND,))
    if candidate.suffix in _SUFFIXES:
        remedy = "Build it again: trtexec --onnx=model.onnx --saveEngine=model.plan"
        raise Unusable(candidate.path, "this is no TensorRT engine: the word ftrt is not at its beginning", remedy)
    return None


def _language_model(candidate: Candidate) -> Artifact | None:
    path = candidate.path
    engines = sorted(path.glob("rank*.engine"))
    if not engines:
        return None
    if not (path / "config.json").is_file():
        remedy = "Copy all that trtllm-build has written, config.json too."
        raise Unusable(path, "these are engines of TensorRT-LLM without their config.json", remedy)
    config = ModelConfig(backend="tensorrtllm")
    files = {child.name: child for child in sorted(path.iterdir())}
    return Artifact("TensorRT-LLM engine", path, candidate.name, config, files, remarks=(_BOUND,))
