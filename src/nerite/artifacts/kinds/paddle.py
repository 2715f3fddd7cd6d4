"""PaddlePaddle: a program in a protobuf message, and its weights beside it. OpenVINO runs it."""

from __future__ import annotations

from pathlib import Path

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate, cut_off
from nerite.artifacts.protobuf_fields import CutOff, NoMessage, fields, messages, text
from nerite.config.model_config import ModelConfig

_BLOCKS, _VARIABLES, _NAME, _PERSISTABLE = 1, 3, 1, 3
_ENDS = ("feed", "fetch")
"""They last, too, and are no weights."""
_AGAIN = "Save the model again: paddle.static.save_inference_model(...), or paddle.jit.save(layer, 'model')"


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a program with its weights."""
    if candidate.suffix == ".pdiparams" and candidate.path.with_suffix(".pdmodel").is_file():
        candidate = candidate.at(candidate.path.with_suffix(".pdmodel"))
    if candidate.is_directory or candidate.suffix != ".pdmodel":
        return None
    path, weights = candidate.path, candidate.path.with_suffix(".pdiparams")
    files = {"model.pdmodel": path}
    if weights.is_file():
        files["model.pdiparams"] = weights
    elif _has_weights(path):
        remedy = f"Copy {weights.name} beside it: it was written together with {path.name}."
        raise Unusable(path, f"its weights are missing: there is no {weights}", remedy)
    return Artifact("PaddlePaddle model", path, candidate.name, ModelConfig(backend="openvino"), files)


def _has_weights(path: Path) -> bool:
    try:
        return any(
            any((number, value) == (_PERSISTABLE, 1) for number, value in fields(variable))
            for block in messages(path.read_bytes(), _BLOCKS)
            for variable in messages(block, _VARIABLES)
            if text(variable, _NAME) not in _ENDS
        )
    except CutOff as error:
        raise cut_off(path, str(error)) from None
    except NoMessage as error:
        raise Unusable(path, f"this is no program of PaddlePaddle: {error}", _AGAIN) from None
