"""Small ONNX models, and what it takes to open and call one without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from nerite.backends.interface import InstanceContext, Marks, ModelContext
from nerite.backends.onnxruntime import OnnxRuntimeBackend
from nerite.core import dtype as dtypes
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import TensorSpec, encode_bytes, to_array

Dims = Sequence[int | str | None] | None
Node = onnx.NodeProto
node = helper.make_node


def tensor(name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def constant(name: str, value: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def model(
    nodes: Sequence[Node],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def identity(dims: Dims = ("N", 4), kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """OUT = IN, one tensor of any type."""
    return model([node("Identity", ["IN"], ["OUT"])], [tensor("IN", dims, kind)], [tensor("OUT", dims, kind)])


def scaled(factor: float = 2.0, dims: Dims = ("N", 4)) -> onnx.ModelProto:
    """OUT = IN * factor."""
    return model(
        [node("Mul", ["IN", "factor"], ["OUT"])],
        [tensor("IN", dims)],
        [tensor("OUT", dims)],
        [constant("factor", np.float32(factor))],
    )


def add_sub() -> onnx.ModelProto:
    """SUM = A + B and DIFFERENCE = A - B."""
    return model(
        [node("Add", ["A", "B"], ["SUM"]), node("Sub", ["A", "B"], ["DIFFERENCE"])],
        [tensor("A", ["N", 4]), tensor("B", ["N", 4])],
        [tensor("SUM", ["N", 4]), tensor("DIFFERENCE", ["N", 4])],
    )


def save(directory: Path, proto: onnx.ModelProto, version: int = 1, name: str = "model.onnx") -> Path:
    path = directory / str(version) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, path)
    return path


def context(
    directory: Path, config: Mapping[str, Any] | None = None, settings: Mapping[str, str] | None = None
) -> ModelContext:
    return ModelContext("m", 1, directory, config or {}, settings or {})


class Opened:
    """A model with one instance, opened as the server does it: complete, then open."""

    def __init__(
        self,
        directory: Path,
        proto: onnx.ModelProto,
        config: Mapping[str, Any] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        save(directory, proto)
        backend = OnnxRuntimeBackend()
        first = context(directory, config, settings)
        self.config = backend.complete(first)
        self.model = backend.open(ModelContext("m", 1, directory, self.config, settings or {}, first.memo))
        self.instance = self.model.instance(InstanceContext("m_0"))

    def execute(self, *requests: InferenceRequest) -> list[InferenceResponse]:
        return list(self.instance.execute(requests, Marks()))

    def answer(self, outputs: Sequence[str] = (), **arrays: Any) -> dict[str, Any]:
        """Send one request and return its outputs as arrays."""
        return decoded(self.execute(request(outputs, **arrays))[0])


def header(specs: Sequence[tuple[str, dtypes.DataType, tuple[int, ...]]], outputs: Sequence[str] = ()) -> RequestHeader:
    made = RequestHeader("m", "", [TensorSpec(*spec) for spec in specs], [RequestedOutput(name) for name in outputs])
    # What validation does; a model without a batch dimension does not look at it.
    made.batch_size = specs[0][2][0] if specs and specs[0][2] else 1
    return made


def request(outputs: Sequence[str] = (), *, bfloat16: bool = False, **arrays: Any) -> InferenceRequest:
    """Return a request with these arrays as inputs; ``bfloat16``: 16-bit words are that type."""
    specs, data = [], []
    for name, value in arrays.items():
        array = np.asarray(value)
        datatype = dtypes.BF16 if bfloat16 and array.dtype == np.uint16 else dtypes.from_numpy(array.dtype)
        assert datatype is not None
        specs.append((name, datatype, array.shape))
        data.append(encode_bytes(array) if datatype is dtypes.BYTES else array.tobytes())
    return bare(header(specs, outputs), data)


def bare(request_header: RequestHeader, data: Sequence[bytes]) -> InferenceRequest:
    return InferenceRequest(request_header, data, _Nobody(), 0)


class _Nobody:
    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        raise AssertionError("a backend returns responses, it does not send them")


def decoded(response: InferenceResponse) -> dict[str, Any]:
    if response.error is not None:
        raise response.error
    assert response.header is not None
    return {spec.name: to_array(spec, data) for spec, data in zip(response.header.outputs, response.data, strict=True)}
