"""Asks the kinds in turn what something is."""

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
"""Those whose signs are plain come first: an ONNX file has no magic word, and is asked about last."""
_KNOWN: Final = (
    "ONNX, TorchScript and torch.export, safetensors, OpenVINO, PaddlePaddle, SavedModel, LiteRT, XGBoost, LightGBM, "
    "treelite, scikit-learn, Hugging Face, TensorRT, MLflow, model.py, a directory of a Triton repository"
)


def recognise(candidate: Candidate) -> Artifact:
    """Return what a file or a directory is. Raises ``Unusable`` for what cannot be served, with what to do."""
    candidate.check()
    logged = logged_model(candidate)
    if logged is not None:
        return _named(recognise(candidate.at(logged.place)), candidate, logged)
    found = _one_of_the_kinds(candidate)
    if found is not None:
        return found
    if candidate.is_directory:
        return _only_one_in(candidate)
    raise Unusable(candidate.path, "this is no kind of model that is known here", f"Known are: {_KNOWN}.")


def _named(artifact: Artifact, candidate: Candidate, logged: LoggedModel) -> Artifact:
    """Return a model that MLflow has logged, under the name of what it was logged to."""
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


def _one_of_the_kinds(candidate: Candidate) -> Artifact | None:
    return next((found for recognised in _KINDS if (found := recognised(candidate)) is not None), None)


def _only_one_in(directory: Candidate) -> Artifact:
    """Return the one model that is in a directory of no kind of its own."""
    found: list[Artifact] = []
    refusals: list[Unusable] = []
    for child in sorted(directory.path.iterdir()):
        if child.name.startswith("."):
            continue
        try:
            candidate = directory.at(child)
            candidate.check()
            artifact = _one_of_the_kinds(candidate)
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
        raise Unusable(directory.path, f"there are several models in it: {names}", "Name one of them.")
    raise Unusable(directory.path, "there is no model in it that is known here", f"Known are: {_KNOWN}.")
