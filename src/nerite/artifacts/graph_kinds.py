"""Recognisers for graph formats: ONNX, OpenVINO, PaddlePaddle, LiteRT, TensorRT engines and TensorFlow."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from nerite.artifacts.artifact import Artifact, Candidate, Unusable, cut_off
from nerite.artifacts.readers import CutOff, NoMessage, message_fields, submessages, text_field
from nerite.config.model_config import ModelConfig
from nerite.core.tensor import Buffer

_MODEL_FIELDS = frozenset((1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26))
_GRAPH, _FUNCTIONS = 7, 25
_NODES, _INITIALIZERS = 1, 5
_ATTRIBUTES = 5
_TENSOR, _SUBGRAPH, _TENSORS, _SUBGRAPHS = 5, 6, 10, 11
_EXTERNAL_DATA = 13
_EXPORT = "Export the model again: torch.onnx.export(...), or the exporter of your framework."


def recognise_onnx(candidate: Candidate) -> Artifact | None:
    """Recognise an ONNX file, with the external files that hold large weights."""
    named = candidate.suffix == ".onnx"
    if candidate.is_directory or not (named or candidate.head[:1] == b"\x08"):
        return None
    path = candidate.path
    with path.open("rb") as file:
        # Never closed explicitly: views on it may still exist, and the mapping is freed with the last of them.
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        found = {field.number for field in message_fields(mapped)}
        if not named and (_GRAPH not in found or found - _MODEL_FIELDS):
            return None
        if _GRAPH not in found:
            raise Unusable(path, "this is not an ONNX model: it has no graph", _EXPORT)
        outside = dict(_external(mapped))
    except NoMessage as error:
        if not named:
            return None
        if isinstance(error, CutOff):
            raise cut_off(path, str(error)) from None
        raise Unusable(path, f"this is not an ONNX model: {error}", _EXPORT) from None
    files = {"model.onnx": path}
    for location, size in outside.items():
        files[location] = _beside(path, location, size)
    return candidate.artifact("ONNX model", ModelConfig(backend="onnxruntime"), files)


def _beside(model: Path, location: str, size: int) -> Path:
    """Return the path of a file with external weights. Raises ``Unusable`` if it is missing or truncated."""
    place = model.parent / location
    if not place.resolve().is_relative_to(model.parent.resolve()):
        raise Unusable(model, f"its weights are outside its directory: {location}", _EXPORT)
    if not place.is_file():
        remedy = f"Copy it to {place}: the exporter wrote it beside the model."
        raise Unusable(model, f"the file with its weights is missing: {location}", remedy)
    if place.stat().st_size < size:
        raise cut_off(place, f"{size - place.stat().st_size:,} bytes of the weights of {model.name} are missing")
    return place


def _external(model: Buffer) -> Iterator[tuple[str, int]]:
    """Yield each external file that holds tensors of the model, and the minimum size that they require."""
    needed: dict[str, int] = {}
    for tensor in _tensors(model):
        entries = {text_field(entry, 1): text_field(entry, 2) for entry in submessages(tensor, _EXTERNAL_DATA)}
        if location := entries.get("location"):
            end = int(entries.get("offset") or 0) + int(entries.get("length") or 0)
            needed[location] = max(needed.get(location, 0), end)
    yield from needed.items()


def _tensors(model: Buffer) -> Iterator[memoryview]:
    for graph in submessages(model, _GRAPH):
        yield from _tensors_of_graph(graph)
    for function in submessages(model, _FUNCTIONS):
        for node in submessages(function, 7):
            yield from _tensors_of_node(node)


def _tensors_of_graph(graph: Buffer) -> Iterator[memoryview]:
    for number, value in message_fields(graph):
        if isinstance(value, memoryview):
            if number == _INITIALIZERS:
                yield value
            elif number == _NODES:
                yield from _tensors_of_node(value)


def _tensors_of_node(node: Buffer) -> Iterator[memoryview]:
    for attribute in submessages(node, _ATTRIBUTES):
        for number, value in message_fields(attribute):
            if isinstance(value, memoryview):
                if number in (_TENSOR, _TENSORS):
                    yield value
                elif number in (_SUBGRAPH, _SUBGRAPHS):
                    yield from _tensors_of_graph(value)


# OpenVINO's intermediate representation: a graph in XML, with its weights in a file beside it.

_AGAIN = "Save the model again: openvino.save_model(model, 'model.xml')"


def recognise_openvino(candidate: Candidate) -> Artifact | None:
    """Recognise an OpenVINO graph with its weights."""
    path = candidate.path
    if candidate.suffix == ".bin" and path.with_suffix(".xml").is_file():
        candidate = candidate.at(path.with_suffix(".xml"))
        path = candidate.path
    head = candidate.head.lstrip()
    if not head.startswith((b"<?xml", b"<net")) or b"<net" not in head:
        return None
    needed = _weights(path)
    files = {"model.xml": path}
    weights = path.with_suffix(".bin")
    if weights.is_file():
        if weights.stat().st_size < needed:
            raise cut_off(
                weights, f"{needed - weights.stat().st_size:,} bytes of the weights of {path.name} are missing"
            )
        files["model.bin"] = weights
    elif needed:
        raise _weights_missing(path, weights)
    return candidate.artifact("OpenVINO model", ModelConfig(backend="openvino"), files)


def _weights_missing(path: Path, weights: Path) -> Unusable:
    remedy = f"Copy {weights.name} into the same directory: it was written together with {path.name}."
    return Unusable(path, f"its weights are missing: {weights}", remedy)


def _weights(path: Path) -> int:
    """Return the minimum size of the weights in bytes. Raises ``Unusable`` if the XML cannot be parsed."""
    needed = 0
    try:
        for _, element in ElementTree.iterparse(path):
            if element.tag == "data" and "offset" in element.attrib and "size" in element.attrib:
                needed = max(needed, int(element.attrib["offset"]) + int(element.attrib["size"]))
            element.clear()
    except ElementTree.ParseError as error:
        raise Unusable(path, f"the XML is invalid: {error}", _AGAIN) from None
    return needed


# PaddlePaddle: a program in a protobuf message, with its weights in a file beside it. OpenVINO runs it.

_BLOCKS, _VARIABLES, _NAME, _PERSISTABLE = 1, 3, 1, 3
_ENDS = ("feed", "fetch")
"""Variables that are marked persistable but are not weights."""
_PADDLE_AGAIN = "Save the model again: paddle.static.save_inference_model(...), or paddle.jit.save(layer, 'model')"


def recognise_paddle(candidate: Candidate) -> Artifact | None:
    """Recognise a PaddlePaddle program with its weights."""
    if candidate.suffix == ".pdiparams" and candidate.path.with_suffix(".pdmodel").is_file():
        candidate = candidate.at(candidate.path.with_suffix(".pdmodel"))
    if candidate.is_directory or candidate.suffix != ".pdmodel":
        return None
    path, weights = candidate.path, candidate.path.with_suffix(".pdiparams")
    files = {"model.pdmodel": path}
    if weights.is_file():
        files["model.pdiparams"] = weights
    elif _has_weights(path):
        raise _weights_missing(path, weights)
    return candidate.artifact("PaddlePaddle model", ModelConfig(backend="openvino"), files)


def _has_weights(path: Path) -> bool:
    try:
        return any(
            any((number, value) == (_PERSISTABLE, 1) for number, value in message_fields(variable))
            for block in submessages(path.read_bytes(), _BLOCKS)
            for variable in submessages(block, _VARIABLES)
            if text_field(variable, _NAME) not in _ENDS
        )
    except CutOff as error:
        raise cut_off(path, str(error)) from None
    except NoMessage as error:
        raise Unusable(path, f"this is not a PaddlePaddle program: {error}", _PADDLE_AGAIN) from None


def recognise_litert(candidate: Candidate) -> Artifact | None:
    """Recognise a LiteRT (formerly TensorFlow Lite) FlatBuffer by its magic number."""
    if candidate.head[4:8] != b"TFL3":
        if candidate.suffix == ".tflite":
            remedy = "Convert the model again: tf.lite.TFLiteConverter, or ai_edge_torch.convert"
            raise Unusable(candidate.path, "this is not a LiteRT model: it does not have the identifier TFL3", remedy)
        return None
    config = ModelConfig(backend="litert")
    return candidate.artifact("LiteRT model", config, {"model.tflite": candidate.path})


# TensorRT and TensorRT-LLM engines, laid out in the repository as Triton expects them.

_BOUND = "It runs only with the TensorRT version and on the kind of GPU that it was built with."
_SUFFIXES = (".plan", ".engine", ".trt")


def recognise_tensorrt(candidate: Candidate) -> Artifact | None:
    """Recognise a TensorRT engine, or a directory of TensorRT-LLM engines."""
    if candidate.is_directory:
        return _language_model(candidate)
    if candidate.head.startswith(b"ftrt"):
        config = ModelConfig(backend="tensorrt", platform="tensorrt_plan")
        files = {"model.plan": candidate.path}
        return candidate.artifact("TensorRT engine", config, files, _BOUND)
    if candidate.suffix in _SUFFIXES:
        remedy = "Build it again: trtexec --onnx=model.onnx --saveEngine=model.plan"
        raise Unusable(candidate.path, "this is not a TensorRT engine: it does not begin with ftrt", remedy)
    return None


def _language_model(candidate: Candidate) -> Artifact | None:
    path = candidate.path
    engines = sorted(path.glob("rank*.engine"))
    if not engines:
        return None
    if not (path / "config.json").is_file():
        remedy = "Copy everything that trtllm-build has written, including config.json."
        raise Unusable(path, "these are TensorRT-LLM engines without their config.json", remedy)
    config = ModelConfig(backend="tensorrtllm")
    files = {child.name: child for child in sorted(path.iterdir())}
    return candidate.artifact("TensorRT-LLM engine", config, files, _BOUND)


# TensorFlow: SavedModel directories, and frozen graphs.

_GRAPH_FILES = ("saved_model.pb", "saved_model.pbtxt")
_SHARD = re.compile(r"variables\.data-(\d{5})-of-(\d{5})")
_SAVED_MODEL_AGAIN = "Export it again: model.export('directory') of Keras, or tf.saved_model.save(module, 'directory')"
_META_GRAPHS, _SAVER, _RESTORE_OPERATION = 2, 3, 3
_GRAPH_DEF_FIELDS = frozenset((1, 2, 3, 4, 5))


def recognise_saved_model(candidate: Candidate) -> Artifact | None:
    """Recognise a SavedModel, or a frozen graph, which contains its weights."""
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
            raise Unusable(
                path, "this is a SavedModel without its graph: saved_model.pb is missing", _SAVED_MODEL_AGAIN
            )
        return None
    restores = graph.suffix == ".pb" and _restores(candidate.at(graph))
    variables = path / "variables"
    shards = {int(found[1]): int(found[2]) for child in variables.glob("*") if (found := _SHARD.fullmatch(child.name))}
    count = max(shards.values(), default=0)
    index = (variables / "variables.index").is_file()
    if index != bool(shards) or len(shards) < count or (restores and not index):
        what = "variables.index" if shards and len(shards) == count else "variables.data-?????-of-?????"
        remedy = f"Copy the whole directory, or export it again. {_SAVED_MODEL_AGAIN}"
        raise Unusable(path, f"this is a SavedModel with weights missing: {variables / what}", remedy)
    config = ModelConfig(backend="tensorflow", platform="tensorflow_savedmodel")
    return candidate.artifact("TensorFlow SavedModel", config, {"model.savedmodel": path})


def _restores(graph: Candidate) -> bool:
    """Return whether loading a graph restores variables. Raises ``Unusable`` if it is truncated or invalid."""
    graph.check()
    try:
        content = graph.path.read_bytes()
        savers = [saver for part in submessages(content, _META_GRAPHS) for saver in submessages(part, _SAVER)]
        return any(text_field(saver, _RESTORE_OPERATION) for saver in savers)
    except CutOff as error:
        raise cut_off(graph.path, str(error)) from None
    except NoMessage as error:
        raise Unusable(graph.path, f"this is not a SavedModel: {error}", _SAVED_MODEL_AGAIN) from None


def _frozen_graph(candidate: Candidate) -> Artifact | None:
    path = candidate.path
    if candidate.suffix not in (".pb", ".graphdef") or candidate.head[:1] != b"\n":
        return None
    try:
        if any(field.number not in _GRAPH_DEF_FIELDS for field in message_fields(path.read_bytes())):
            return None
    except CutOff as error:
        raise cut_off(path, str(error)) from None
    except NoMessage:
        return None
    config = ModelConfig(backend="tensorflow", platform="tensorflow_graphdef")
    return candidate.artifact("TensorFlow graph", config, {"model.graphdef": path})
