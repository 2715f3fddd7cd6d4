"""ONNX: a graph in a protobuf message, with large weights in files beside it, perhaps."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate, cut_off
from nerite.artifacts.protobuf_fields import CutOff, NoMessage, fields, messages, text
from nerite.config.model_config import ModelConfig
from nerite.core.tensor import Buffer

_MODEL_FIELDS = frozenset((1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26))
_GRAPH, _FUNCTIONS = 7, 25
_NODES, _INITIALIZERS = 1, 5
_ATTRIBUTES = 5
_TENSOR, _SUBGRAPH, _TENSORS, _SUBGRAPHS = 5, 6, 10, 11
_EXTERNAL_DATA = 13
_EXPORT = "Export the model again: torch.onnx.export(...), or the exporter of your framework."


def recognise(candidate: Candidate) -> Artifact | None:
    """Return an ONNX file with the files that its weights are in."""
    named = candidate.suffix == ".onnx"
    if candidate.is_directory or not (named or candidate.head[:1] == b"\x08"):
        return None
    path = candidate.path
    with path.open("rb") as file:
        # Not closed: what looks at its parts may still be there, and it goes with the last of them.
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        found = {field.number for field in fields(mapped)}
        if not named and (_GRAPH not in found or found - _MODEL_FIELDS):
            return None
        if _GRAPH not in found:
            raise Unusable(path, "this is no ONNX model: there is no graph in it", _EXPORT)
        outside = dict(_external(mapped))
    except NoMessage as error:
        if not named:
            return None
        if isinstance(error, CutOff):
            raise cut_off(path, str(error)) from None
        raise Unusable(path, f"this is no ONNX model: {error}", _EXPORT) from None
    files = {"model.onnx": path}
    for location, size in outside.items():
        files[location] = _beside(path, location, size)
    return Artifact("ONNX model", path, candidate.name, ModelConfig(backend="onnxruntime"), files)


def _beside(model: Path, location: str, size: int) -> Path:
    """Return the file with weights. Raises ``Unusable`` if it is not there, or not whole."""
    place = model.parent / location
    if not place.resolve().is_relative_to(model.parent.resolve()):
        raise Unusable(model, f"its weights are outside of its directory: {location}", _EXPORT)
    if not place.is_file():
        remedy = f"Copy it to {place}: it was written beside the model when that was exported."
        raise Unusable(model, f"its weights are in a file that is missing: {location}", remedy)
    if place.stat().st_size < size:
        raise cut_off(place, f"{size - place.stat().st_size:,} bytes of the weights of {model.name} are missing")
    return place


def _external(model: Buffer) -> Iterator[tuple[str, int]]:
    """Yield each file that tensors of the model are in, and its size as far as they need it."""
    needed: dict[str, int] = {}
    for tensor in _tensors(model):
        entries = {text(entry, 1): text(entry, 2) for entry in messages(tensor, _EXTERNAL_DATA)}
        if location := entries.get("location"):
            end = int(entries.get("offset") or 0) + int(entries.get("length") or 0)
            needed[location] = max(needed.get(location, 0), end)
    yield from needed.items()


def _tensors(model: Buffer) -> Iterator[memoryview]:
    for graph in messages(model, _GRAPH):
        yield from _tensors_of_graph(graph)
    for function in messages(model, _FUNCTIONS):
        for node in messages(function, 7):
            yield from _tensors_of_node(node)


def _tensors_of_graph(graph: Buffer) -> Iterator[memoryview]:
    for number, value in fields(graph):
        if isinstance(value, memoryview):
            if number == _INITIALIZERS:
                yield value
            elif number == _NODES:
                yield from _tensors_of_node(value)


def _tensors_of_node(node: Buffer) -> Iterator[memoryview]:
    for attribute in messages(node, _ATTRIBUTES):
        for number, value in fields(attribute):
            if isinstance(value, memoryview):
                if number in (_TENSOR, _TENSORS):
                    yield value
                elif number in (_SUBGRAPH, _SUBGRAPHS):
                    yield from _tensors_of_graph(value)
