"""Recognises a file or directory by trying the recogniser of each kind of model in order."""

from __future__ import annotations

import dataclasses
from typing import Final

from nerite.artifacts import directory_kinds, graph_kinds, torch_kinds, tree_kinds
from nerite.artifacts.artifact import Artifact, Candidate, Unusable
from nerite.artifacts.readers import LoggedModel, logged_model
from nerite.config.loading import CONFIG_FILE

_KINDS: Final = (
    directory_kinds.recognise_triton_model,
    graph_kinds.recognise_tensorrt,
    graph_kinds.recognise_saved_model,
    directory_kinds.recognise_hugging_face,
    directory_kinds.recognise_python_model,
    directory_kinds.recognise_foreign,
    torch_kinds.recognise_torchscript,
    torch_kinds.recognise_exported_program,
    torch_kinds.recognise_torch_checkpoint,
    directory_kinds.recognise_nemo,
    tree_kinds.recognise_scikit_learn,
    tree_kinds.recognise_xgboost,
    tree_kinds.recognise_lightgbm,
    graph_kinds.recognise_litert,
    graph_kinds.recognise_openvino,
    graph_kinds.recognise_paddle,
    torch_kinds.recognise_safetensors,
    tree_kinds.recognise_treelite,
    graph_kinds.recognise_onnx,
)
"""Recognisers of formats with unambiguous signs come first; ONNX files have no magic number and are tried last."""
_KNOWN: Final = (
    "ONNX, TorchScript and torch.export, safetensors, OpenVINO, PaddlePaddle, SavedModel, LiteRT, XGBoost, LightGBM, "
    "treelite, scikit-learn, Hugging Face, TensorRT, MLflow, model.py, a directory of a Triton repository"
)


def recognise(candidate: Candidate) -> Artifact:
    """Return the model in a file or directory. Raises ``Unusable``, with a remedy, if it cannot be served."""
    candidate.check()
    logged = logged_model(candidate)
    if logged is not None:
        return _as_logged(recognise(candidate.at(logged.place)), candidate, logged)
    found = _recognised(candidate)
    if found is not None:
        return found
    if candidate.is_directory:
        return _only_model_in(candidate)
    raise Unusable(candidate.path, "not a known kind of model", f"Known kinds: {_KNOWN}.")


def _as_logged(artifact: Artifact, candidate: Candidate, logged: LoggedModel) -> Artifact:
    """Return a model that MLflow has logged, with the name and configuration that it was logged with."""
    beside = dict(artifact.beside)
    if logged.config is not None:
        beside[CONFIG_FILE] = logged.config
    return dataclasses.replace(
        artifact,
        kind=f"{artifact.kind}, logged by MLflow",
        name=candidate.name,
        beside=beside,
        finished=artifact.finished or logged.config is not None,
    )


def _recognised(candidate: Candidate) -> Artifact | None:
    return next((found for recogniser in _KINDS if (found := recogniser(candidate)) is not None), None)


def _only_model_in(directory: Candidate) -> Artifact:
    """Return the only model in a directory that is not itself a model."""
    found: list[Artifact] = []
    refusals: list[Unusable] = []
    for child in sorted(directory.path.iterdir()):
        if child.name.startswith("."):
            continue
        try:
            candidate = directory.at(child)
            candidate.check()
            artifact = _recognised(candidate)
        except Unusable as error:
            refusals.append(error)
            continue
        if artifact is not None and artifact.source not in [other.source for other in found]:
            found.append(artifact)
    if len(found) == 1:
        return found[0]
    if not found and refusals:
        raise refusals[0]
    names = ", ".join(artifact.source.name for artifact in found)
    if found:
        raise Unusable(directory.path, f"the directory contains several models: {names}", "Specify one of them.")
    raise Unusable(directory.path, "the directory contains no known kind of model", f"Known kinds: {_KNOWN}.")
