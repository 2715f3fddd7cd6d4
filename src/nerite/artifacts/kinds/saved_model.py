"""TensorFlow: SavedModel directories, and frozen graphs."""

from __future__ import annotations

import re

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate, cut_off
from nerite.artifacts.protobuf_fields import CutOff, NoMessage, fields, messages, text
from nerite.config.model_config import ModelConfig

_GRAPH_FILES = ("saved_model.pb", "saved_model.pbtxt")
_SHARD = re.compile(r"variables\.data-(\d{5})-of-(\d{5})")
_AGAIN = "Export it again: model.export('directory') of Keras, or tf.saved_model.save(module, 'directory')"
_META_GRAPHS, _SAVER, _RESTORE_OPERATION = 2, 3, 3
_GRAPH_DEF_FIELDS = frozenset((1, 2, 3, 4, 5))


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a SavedModel, or a graph with its weights in it."""
    if candidate.path.name in _GRAPH_FILES:
        candidate = candidate.at(candidate.path.parent)
    if candidate.is_directory:
        return _saved_model(candidate)
    return _frozen_graph(candidate)


def _saved_model(candidate: Candidate) -> Artifact | None:
    path = candidate.path
    graph = next((path / name for name in _GRAPH_FILES if (path / name).is_file()), None)
    if graph is None:
        if (path / "variables" / "variables.index").is_file():
            raise Unusable(path, "this is a SavedModel without its graph: saved_model.pb is missing", _AGAIN)
        return None
    restores = graph.suffix == ".pb" and _restores(candidate.at(graph))
    variables = path / "variables"
    shards = {int(found[1]): int(found[2]) for child in variables.glob("*") if (found := _SHARD.fullmatch(child.name))}
    count = max(shards.values(), default=0)
    index = (variables / "variables.index").is_file()
    if index != bool(shards) or len(shards) < count or (restores and not index):
        what = "variables.index" if shards and len(shards) == count else "variables.data-?????-of-?????"
        remedy = f"Copy the whole directory, or export it again. {_AGAIN}"
        raise Unusable(path, f"this is a SavedModel with weights missing: {variables / what}", remedy)
    config = ModelConfig(backend="tensorflow", platform="tensorflow_savedmodel")
    return Artifact("TensorFlow SavedModel", path, candidate.name, config, {"model.savedmodel": path})


def _restores(graph: Candidate) -> bool:
    """Return whether a graph reads variables when it is loaded. Raises ``Unusable`` for one that is not whole."""
    graph.check()
    try:
        content = graph.path.read_bytes()
        savers = [saver for part in messages(content, _META_GRAPHS) for saver in messages(part, _SAVER)]
        return any(text(saver, _RESTORE_OPERATION) for saver in savers)
    except CutOff as error:
        raise cut_off(graph.path, str(error)) from None
    except NoMessage as error:
        raise Unusable(graph.path, f"this is no SavedModel: {error}", _AGAIN) from None


def _frozen_graph(candidate: Candidate) -> Artifact | None:
    path = candidate.path
    if candidate.suffix not in (".pb", ".graphdef") or candidate.head[:1] != b"\n":
        return None
    try:
        if any(field.number not in _GRAPH_DEF_FIELDS for field in fields(path.read_bytes())):
            return None
    except CutOff as error:
        raise cut_off(path, str(error)) from None
    except NoMessage:
        return None
    config = ModelConfig(backend="tensorflow", platform="tensorflow_graphdef")
    return Artifact("TensorFlow graph", path, candidate.name, config, {"model.graphdef": path})
