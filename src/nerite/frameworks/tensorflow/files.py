"""Reads the inputs and outputs of frozen graphs (GraphDef) with TensorFlow, and of SavedModels without it.

A frozen graph names no inputs and outputs. Inputs are its placeholders; outputs are those of the configuration, under
the name of an operation (``probabilities``) or of one of its tensors (``probabilities:1``). Without a configuration,
they are the tensors that no operation of the graph consumes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from nerite.backends.arrays.graph import ModelGraph
from nerite.backends.configuration import all_inputs, all_outputs
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported
from nerite.frameworks.tensorflow.plan import DescribedTensor, TensorFlowPlan, TensorFlowSignature, signature_tensors

_PLACEHOLDER: Final = "Placeholder"
_WITH_DEFAULT: Final = "PlaceholderWithDefault"
_NO_OUTPUT: Final = frozenset({"Assert", "Const", "NoOp", _PLACEHOLDER})


def read_graph(framework: Any, model: str, path: Path, *, placed: bool) -> Any:
    """Return the ``tf.Graph`` in a file. ``placed`` keeps the devices in it. Raises ``NeriteError``."""
    from google.protobuf.message import DecodeError

    v1 = framework.compat.v1
    definition = v1.GraphDef()
    remedy = "It has to be a frozen graph: a binary GraphDef with its variables made constants"
    if not path.is_file():
        raise InvalidArgument(f"unable to load model '{model}', '{path}' is a directory. {remedy}")
    try:
        definition.ParseFromString(path.read_bytes())
    except DecodeError:
        raise InvalidArgument(
            f"unable to load model '{model}', '{path}' cannot be read as a GraphDef, or was copied in part. {remedy}"
        ) from None
    if not definition.node:
        raise InvalidArgument(f"model {model} has an empty network. {remedy}")
    if not placed:
        for node in definition.node:
            node.device = ""
    graph = framework.Graph()
    with graph.as_default():
        try:
            v1.import_graph_def(definition, name="")
        except ValueError as error:
            raise InvalidArgument(f"unable to load model '{model}', '{path}': {error}") from error
    return graph


def signature_of_graph(graph: Any, model: str, config: Mapping[str, Any]) -> TensorFlowSignature:
    """Return the inputs and outputs of a frozen graph, as the configuration names them. Raises ``NeriteError``."""
    placeholders = {op.name: op.outputs[0] for op in graph.get_operations() if op.type == _PLACEHOLDER}
    defaulted = {op.name: op.outputs[0] for op in graph.get_operations() if op.type == _WITH_DEFAULT}
    requested = [entry["name"] for entry in all_outputs(config)]
    outputs = {name: found for name in requested if (found := _tensor(graph, name)) is not None}
    if not requested:
        outputs = _unconsumed(graph)
    declared = {entry["name"] for entry in all_inputs(config)}
    needed = _ancestors(outputs.values())
    inputs = {name: tensor for name, tensor in placeholders.items() if name in declared or tensor.op in needed}
    optional = {name: tensor for name, tensor in defaulted.items() if name in declared}
    described = [
        signature_tensors(model, {name: _described(tensor) for name, tensor in side.items()}, config, key)
        for side, key in ((inputs, "input"), (outputs, "output"), (optional, "input"))
    ]
    return TensorFlowSignature(
        ModelGraph(*described),
        {name: tensor.name for name, tensor in (*inputs.items(), *optional.items())},
        {name: tensor.name for name, tensor in outputs.items()},
    )


def _tensor(graph: Any, name: str) -> Any:
    try:
        return graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    except (KeyError, ValueError):
        return None


def _unconsumed(graph: Any) -> dict[str, Any]:
    found = {}
    for operation in graph.get_operations():
        for index, tensor in enumerate(operation.outputs):
            if operation.type not in _NO_OUTPUT and not tensor.consumers():
                found[tensor.name if index else operation.name] = tensor
    return found


def _ancestors(of: Iterable[Any]) -> set[Any]:
    """Return all operations that these tensors depend on."""
    seen: set[Any] = set()
    ahead = [tensor.op for tensor in of]
    while ahead:
        operation = ahead.pop()
        if operation not in seen:
            seen.add(operation)
            ahead += [tensor.op for tensor in operation.inputs]
            ahead += operation.control_inputs
    return seen


def _described(tensor: Any) -> DescribedTensor:
    shape = tensor.shape
    dims = None if shape.rank is None else tuple(-1 if size is None else int(size) for size in shape)
    return DescribedTensor(tensor.name, tensor.dtype.base_dtype.name, dims)


# Protobuf messages of a SavedModel, with only the fields that are read here.
#
# They have their own descriptor pool, because TensorFlow registers the full messages in the same process. A map there
# is a list of entries here, which has the same encoding.

_PACKAGE: Final = "nerite.tensorflow"
_REPEATED: Final = "*"
_FIELDS: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "SavedModel": {"meta_graphs": (2, "*MetaGraph")},
    "MetaGraph": {"info": (1, "MetaInfo"), "signatures": (5, "*SignatureEntry")},
    "MetaInfo": {"tags": (4, "*string"), "tensorflow_version": (5, "string")},
    "SignatureEntry": {"key": (1, "string"), "value": (2, "Signature")},
    "Signature": {"inputs": (1, "*TensorEntry"), "outputs": (2, "*TensorEntry")},
    "TensorEntry": {"key": (1, "string"), "value": (2, "TensorInfo")},
    "TensorInfo": {"name": (1, "string"), "dtype": (2, "int32"), "shape": (3, "Shape")},
    "Shape": {"dim": (2, "*Dim"), "unknown_rank": (3, "bool")},
    "Dim": {"size": (1, "int64")},
}
"""Number and type of each field of each message; ``*`` marks repeated fields."""


@cache
def saved_model() -> Any:
    """Return the message class of ``saved_model.pb``."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    file = FileDescriptorProto(name="saved_model.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            field.label = getattr(FieldDescriptorProto, f"LABEL_{'REPEATED' if kind[0] == _REPEATED else 'OPTIONAL'}")
            kind = kind.lstrip(_REPEATED)
            if kind in _FIELDS:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}")
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.SavedModel"))


# SavedModels, read without TensorFlow.

_log = logging.getLogger("nerite.frameworks.tensorflow")

_FILE: Final = "saved_model.pb"
_INTERNAL: Final = frozenset({"__saved_model_init_op", "__saved_model_train_op"})
_DATATYPES: Final[dict[int, str]] = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string", 8: "complex64",
    9: "int64", 10: "bool", 11: "qint8", 12: "quint8", 13: "qint32", 14: "bfloat16", 15: "qint16", 16: "quint16",
    17: "uint16", 18: "complex128", 19: "float16", 20: "resource", 21: "variant", 22: "uint32", 23: "uint64",
}  # fmt: skip
"""TensorFlow's names of data types, by its numbers."""


def read_signature(model: str, plan: TensorFlowPlan) -> Any:
    """Return the configured ``SignatureDef`` of a SavedModel. Raises ``NeriteError`` with the remedy."""
    return _signature(model, plan, _meta_graph(model, plan, _read(model, plan.path)))


def signature_of_saved_model(signature: Any, model: str, config: Mapping[str, Any]) -> TensorFlowSignature:
    """Return the inputs and outputs of a signature. Raises ``NeriteError``."""
    for side, entries in (("input", signature.inputs), ("output", signature.outputs)):
        for entry in entries:
            if not entry.value.name:
                raise Unsupported(
                    f"unable to process {side} '{entry.key}' for '{model}': it is a sparse or ragged tensor, which "
                    "the protocol does not have. Export a signature that takes and gives its parts"
                )
    return TensorFlowSignature(
        ModelGraph(
            signature_tensors(model, _saved_model_described(signature.inputs), config, "input"),
            signature_tensors(model, _saved_model_described(signature.outputs), config, "output"),
            {},
        ),
        {entry.key: entry.value.name for entry in signature.inputs},
        {entry.key: entry.value.name for entry in signature.outputs},
    )


def _read(model: str, path: Path) -> Any:
    file = path / _FILE
    if not file.is_file():
        raise Unavailable(f"unable to load model '{model}', '{path}' is not a SavedModel: {_what_is_wrong(path)}")
    from google.protobuf.message import DecodeError

    try:
        return saved_model().FromString(file.read_bytes())
    except DecodeError:
        raise InvalidArgument(
            f"unable to load model '{model}', '{file}' cannot be read as a SavedModel. It has {file.stat().st_size} "
            "bytes: was it copied whole?"
        ) from None


def _what_is_wrong(path: Path) -> str:
    if not path.is_dir():
        return "it is a file, and has to be the directory that TensorFlow saved"
    if (path / "saved_model.pbtxt").exists():
        return f"it is in text form. Load it with TensorFlow and save it again, for {_FILE}"
    for deeper in sorted(path.glob(f"*/{_FILE}")):
        return f"{_FILE} is in '{deeper.parent.name}' in it. Move what is there up to '{path.name}'"
    return f"there is no {_FILE} in it. A Keras model becomes one by model.export('{path}')"


def _meta_graph(model: str, plan: TensorFlowPlan, saved_model: Any) -> Any:
    for meta_graph in saved_model.meta_graphs:
        if frozenset(meta_graph.info.tags) == frozenset(plan.tags):
            return meta_graph
    there = "; ".join(sorted(", ".join(sorted(each.info.tags)) for each in saved_model.meta_graphs))
    raise InvalidArgument(
        f"unable to load model '{model}', expected '{','.join(plan.tags)}' tag. The graphs there are have the tags: "
        f"{there or 'none'}. Set parameter TF_GRAPH_TAG to those of one"
    )


def _signature(model: str, plan: TensorFlowPlan, meta_graph: Any) -> Any:
    by_name = {entry.key: entry.value for entry in meta_graph.signatures if entry.key not in _INTERNAL}
    wanted = plan.signature or "serving_default"
    if wanted not in by_name and not plan.signature and len(by_name) == 1:
        (wanted,) = by_name
        _log.warning("unable to find serving signature 'serving_default' of '%s', using signature '%s'", model, wanted)
    signature = by_name.get(wanted)
    if signature is None or not signature.outputs:
        offered = sorted(name for name, each in by_name.items() if each.outputs)
        remedy = (
            f"The signatures there are: {', '.join(offered)}. Set parameter TF_SIGNATURE_DEF to one"
            if offered
            else "The model has no signature with outputs: save it with signatures={'serving_default': function}"
        )
        raise InvalidArgument(f"unable to load model '{model}', expected '{wanted}' signature. {remedy}")
    return signature


def _saved_model_described(entries: Iterable[Any]) -> dict[str, DescribedTensor]:
    # Sorted, because a map has no order and clients use positions.
    return {
        entry.key: DescribedTensor(
            entry.value.name,
            _DATATYPES.get(entry.value.dtype, f"type {entry.value.dtype}"),
            None if entry.value.shape.unknown_rank else tuple(dim.size for dim in entry.value.shape.dim),
        )
        for entry in sorted(entries, key=lambda entry: str(entry.key))
    }
