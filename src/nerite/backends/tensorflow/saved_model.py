"""SavedModels, read without TensorFlow: which graphs and signatures there are, and the tensors of one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from nerite.backends.arrays.graph import Graph
from nerite.backends.tensorflow import schema
from nerite.backends.tensorflow.plan import SessionPlan
from nerite.backends.tensorflow.signature import Described, Signature, tensors
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported

_log = logging.getLogger("nerite.backends.tensorflow")

_FILE: Final = "saved_model.pb"
_NOT_FOR_CALLERS: Final = frozenset({"__saved_model_init_op", "__saved_model_train_op"})
_DATATYPES: Final[dict[int, str]] = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string", 8: "complex64",
    9: "int64", 10: "bool", 11: "qint8", 12: "quint8", 13: "qint32", 14: "bfloat16", 15: "qint16", 16: "quint16",
    17: "uint16", 18: "complex128", 19: "float16", 20: "resource", 21: "variant", 22: "uint32", 23: "uint64",
}  # fmt: skip
"""TensorFlow's names by its numbers."""


def read_signature(model: str, plan: SessionPlan, config: Mapping[str, Any]) -> Signature:
    """Return what the SavedModel of a plan takes and gives. Raises ``NeriteError`` with what to do about it."""
    signature = _signature(model, plan, _meta_graph(model, plan, _read(model, plan.path)))
    for side, entries in (("input", signature.inputs), ("output", signature.outputs)):
        for entry in entries:
            if not entry.value.name:
                raise Unsupported(
                    f"unable to process {side} '{entry.key}' for '{model}': it is a sparse or ragged tensor, which "
                    "the protocol does not have. Export a signature that takes and gives its parts"
                )
    return Signature(
        Graph(
            tensors(model, _described(signature.inputs), config, "input"),
            tensors(model, _described(signature.outputs), config, "output"),
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
        return schema.saved_model().FromString(file.read_bytes())
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


def _meta_graph(model: str, plan: SessionPlan, saved_model: Any) -> Any:
    for meta_graph in saved_model.meta_graphs:
        if frozenset(meta_graph.info.tags) == frozenset(plan.tags):
            return meta_graph
    there = "; ".join(sorted(", ".join(sorted(each.info.tags)) for each in saved_model.meta_graphs))
    raise InvalidArgument(
        f"unable to load model '{model}', expected '{','.join(plan.tags)}' tag. The graphs there are have the tags: "
        f"{there or 'none'}. Set parameter TF_GRAPH_TAG to those of one"
    )


def _signature(model: str, plan: SessionPlan, meta_graph: Any) -> Any:
    by_name = {entry.key: entry.value for entry in meta_graph.signatures if entry.key not in _NOT_FOR_CALLERS}
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


def _described(entries: Iterable[Any]) -> dict[str, Described]:
    # Sorted, as a map has no order and clients index what they get.
    return {
        entry.key: Described(
            entry.value.name,
            _DATATYPES.get(entry.value.dtype, f"type {entry.value.dtype}"),
            None if entry.value.shape.unknown_rank else tuple(dim.size for dim in entry.value.shape.dim),
        )
        for entry in sorted(entries, key=lambda entry: str(entry.key))
    }
