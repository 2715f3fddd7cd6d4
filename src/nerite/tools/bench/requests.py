"""Prepares the requests of a benchmark: queries the server about the model, and generates or reads inputs."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from nerite.client import Client, ClientError, ModelDescription, TensorDescription
from nerite.client.tensors import random_value, to_json, to_tensor, value_type, widened
from nerite.core import tensor as dtypes
from nerite.core.tensor import Array, TensorSpec, buffer_of, encode_bytes, to_array
from nerite.tools.bench.forms import (
    BenchGenerateForm,
    BenchOutput,
    BenchRequest,
    BenchTensor,
    GrpcInferForm,
    HttpInferForm,
    RequestForm,
    RoundRobin,
    Scripts,
    Sequences,
    SequenceStep,
)
from nerite.tools.bench.measurement import BenchPlan, BenchTarget
from nerite.tools.bench.session import BenchedServer, BenchRegions
from nerite.tools.trial_inputs import (
    Shapes,
    check_shapes,
    first_answered,
    may_be_of_shape,
    shapes_to_try,
    sizes_advice,
    variable_inputs,
)

# Inputs: generated, or read from files in the formats of perf_analyzer.

Request = Mapping[str, Array]
"""Inputs of a request by name."""


def made_up_data(inputs: Iterable[TensorDescription], shapes: Shapes, *, zero: bool = False) -> Request:
    """Return random inputs, or zeros and empty strings."""
    made = {}
    for tensor in inputs:
        shape = (shapes.batch, *shapes.of(tensor)) if shapes.batch else shapes.of(tensor)
        nothing = b"" if tensor.datatype == "BYTES" else 0
        made[tensor.name] = np.full(shape, nothing, value_type(tensor)) if zero else random_value(tensor, shape)
    return made


def read_data(path: Path, model: ModelDescription, shapes: Shapes) -> list[list[Request]]:
    """Return the requests in a file or directory, as sequences of one or more requests. Raises ``ClientError``."""
    try:
        if path.is_dir():
            return [[_from_directory(path, model, shapes)]]
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ClientError(f"cannot read the data in {error.filename}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise ClientError(f"the data in {path} are not JSON: {error}") from None
    sequences = document.get("data") if isinstance(document, dict) else None
    if not isinstance(sequences, list) or not sequences:
        raise ClientError(f'{path} has no list of data: write {{"data": [{{"INPUT": [values], ...}}, ...]}}')
    sequences = [entry if isinstance(entry, list) else [entry] for entry in sequences]
    described = {tensor.name: tensor for tensor in model.inputs}
    return [
        [_request(entry, described, shapes, f"{path}, data {at}") for entry in sequence]
        for at, sequence in enumerate(sequences)
    ]


def _request(entry: Any, described: Mapping[str, TensorDescription], shapes: Shapes, place: str) -> Request:
    if not isinstance(entry, dict):
        raise ClientError(
            f'{place}: write {{"INPUT": [values], ...}} for each request. Inputs of the model: {", ".join(described)}'
        )
    found = {}
    for name, value in entry.items():
        if name not in described:
            raise ClientError(f"{place}: the model has no input '{name}'. Its inputs: {', '.join(described)}")
        try:
            found[name] = shapes.batched(_value(value, described[name], shapes))
        except (ValueError, TypeError) as error:
            raise ClientError(f"{place}, input {described[name]}: {error}") from None
    return found


def _value(value: Any, tensor: TensorDescription, shapes: Shapes) -> Array:
    shape: Sequence[int] = ()
    if isinstance(value, dict):
        shape = value.get("shape", ())
        if "content" in value:
            value = value["content"]
        elif "b64" not in value:
            raise ValueError('write [values], {"content": [values], "shape": [sizes]} or {"b64": "..."}')
        if isinstance(value, dict):
            return _from_bytes(base64.b64decode(value["b64"]), tensor, tuple(shape) or shapes.of(tensor))
    array = np.array(value, value_type(tensor)).ravel()
    if not shape:
        own = tensor.shape[1:] if shapes.batch else tensor.shape
        # A single variable dimension follows from the number of values.
        free = tensor.name not in shapes.given and list(own).count(-1) == 1
        shape = own if free else shapes.of(tensor)
    return array.reshape(shape)


def _from_directory(path: Path, model: ModelDescription, shapes: Shapes) -> Request:
    """Read a file for each input: its raw bytes, or for BYTES one string per line."""
    found = {}
    for tensor in model.inputs:
        content = (path / tensor.name).read_bytes()
        shape = shapes.of(tensor)
        if tensor.datatype == "BYTES":
            lines = content.splitlines()[: math.prod(shape)]
            if len(lines) < math.prod(shape):
                raise ClientError(f"{path / tensor.name} has {len(lines)} lines, but {tensor} needs {math.prod(shape)}")
            found[tensor.name] = shapes.batched(np.array(lines, object).reshape(shape))
        else:
            found[tensor.name] = shapes.batched(_from_bytes(content, tensor, shape))
    return found


def _from_bytes(content: bytes, tensor: TensorDescription, shape: tuple[int, ...]) -> Array:
    spec = TensorSpec(tensor.name, dtypes.BY_NAME[tensor.datatype], shape)
    if spec.byte_size not in (-1, len(content)):
        raise ClientError(
            f"input {tensor}: {len(content)} bytes are not {spec.byte_size}, as the shape {list(shape)} requires"
        )
    if tensor.datatype == "BF16":
        return widened(np.frombuffer(content, "<u2")).reshape(shape)
    return to_array(spec, content)


@dataclass(frozen=True, slots=True)
class TensorLoad:
    """Specifies the inference requests to send to a model."""

    model: str
    version: str = ""
    batch: int = 1
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    data: Path | Literal["random", "zero"] = "random"
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    streaming: bool = False
    sequence_length: int = 0
    """Number of requests in a sequence; 0 for no sequences."""
    first_id: int = 1
    output_room: int = 0
    """Bytes of shared memory for each output."""


def prepared_tensors(
    wanted: TensorLoad, target: BenchTarget, server: BenchedServer, regions: BenchRegions | None = None
) -> BenchPlan:
    """Return a plan for a model on the server, with tensors in ``regions`` if given.

    Raises ``ClientError``, or ``InvalidArgument`` for shapes that do not fit.
    """
    model = server.model(wanted.model, wanted.version)
    config = server.config(wanted.model, wanted.version)
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
    if decoupled and not wanted.streaming:
        raise ClientError(f"model '{model.name}' is decoupled: measure it with --streaming")
    batching = config.get("sequence_batching")
    if batching is not None and not batching.get("iterative_sequence") and not wanted.sequence_length:
        raise ClientError(f"model '{model.name}' takes sequences: set their length with --sequence-length")
    given = wanted.shapes
    wanted = sized(wanted, server)
    shapes = _shapes(wanted, model, int(config.get("max_batch_size", 0)))
    if isinstance(wanted.data, Path):
        sequences = read_data(wanted.data, model, shapes)
    else:
        sequences = [[made_up_data(_needed(model, config), shapes, zero=wanted.data == "zero")]]
    form = _forms(wanted, target, model, regions)
    forms = [[form(request) for request in sequence] for sequence in sequences]
    chosen = {name: sizes for name, sizes in wanted.shapes.items() if name not in given}
    return BenchPlan(target, _scripts(wanted, forms), wanted.streaming, decoupled, shapes=chosen)


def sized(wanted: TensorLoad, server: BenchedServer) -> TensorLoad:
    """Return the load with sizes of variable dimensions that the model accepts: the most plausible ones.

    Requests in files are left as they are, and streams, whose number of responses may depend on the sizes. Raises
    ``InvalidArgument`` for shapes that do not fit, and ``ClientError`` if the model accepts no plausible one.
    """
    model = server.model(wanted.model, wanted.version)
    config = server.config(wanted.model, wanted.version)
    batching = int(config.get("max_batch_size", 0)) > 0
    check_shapes(wanted.shapes, model.inputs, batching=batching)
    if wanted.streaming or isinstance(wanted.data, Path):
        return wanted
    needed = _needed(model, config)
    attempts = list(shapes_to_try(needed, batching=batching, given=wanted.shapes))
    if len(attempts) == 1:
        return wanted

    def ask(shapes: Mapping[str, tuple[int, ...]]) -> None:
        request = made_up_data(needed, Shapes(int(batching), shapes), zero=wanted.data == "zero")
        step = SequenceStep(wanted.first_id, True, True) if wanted.sequence_length else None
        if isinstance(server, Client):
            parameters = {**wanted.parameters, **(step._asdict() if step is not None else {})}
            server.infer(wanted.model, request, parameters=parameters, version=wanted.version)
        else:
            asked = BenchRequest(
                wanted.model, wanted.version, tuple(_tensors(model, request)), parameters=wanted.parameters
            )
            server.infer(GrpcInferForm(asked).encoded(step))

    free = variable_inputs(needed, wanted.shapes, batching=batching)
    try:
        shapes, _ = first_answered(attempts, ask)
    except ClientError as error:
        if not may_be_of_shape(error):
            raise
        advice = sizes_advice(free, batching=batching)
        raise ClientError(
            f"model '{model.name}' fails with made-up data: {error}\n    {advice}",
            error.status,
        ) from error
    return replace(wanted, shapes={**wanted.shapes, **{tensor.name: shapes[tensor.name] for tensor in free}})


def _needed(model: ModelDescription, config: Mapping[str, Any]) -> list[TensorDescription]:
    """Return the required inputs of a model."""
    optional = {entry["name"] for entry in config.get("input", ()) if entry.get("optional")}
    return [tensor for tensor in model.inputs if tensor.name not in optional]


def _scripts(wanted: TensorLoad, sequences: Sequence[Sequence[RequestForm]]) -> Scripts:
    if not wanted.sequence_length:
        return RoundRobin([form.encoded() for sequence in sequences for form in sequence])
    if any(len(sequence) > 1 for sequence in sequences):
        return Sequences(sequences, wanted.first_id)
    # Data that are not sequences are cut into sequences.
    forms = itertools.cycle(form for sequence in sequences for form in sequence)
    length = wanted.sequence_length
    return Sequences([list(itertools.islice(forms, length)) for _ in sequences], wanted.first_id)


def _shapes(wanted: TensorLoad, model: ModelDescription, most: int) -> Shapes:
    if wanted.batch > max(most, 1):
        limit = f"takes batches of at most {most}" if most else "does not support batching"
        raise ClientError(f"model '{model.name}' {limit}: --batch {wanted.batch} is too large")
    return Shapes(wanted.batch if most else 0, wanted.shapes)


def _forms(
    wanted: TensorLoad, target: BenchTarget, model: ModelDescription, regions: BenchRegions | None
) -> Callable[[Request], RequestForm]:
    """Return a function that makes a request from its inputs."""
    names = wanted.outputs or [tensor.name for tensor in model.outputs]
    outputs = tuple(map(BenchOutput, wanted.outputs))
    if regions is not None and wanted.output_room:
        outputs = regions.outputs(names, wanted.output_room)

    def form(request: Request) -> RequestForm:
        if wanted.streaming and target.protocol == "http":
            inputs = {name: _as_json(value) for name, value in request.items()}
            return BenchGenerateForm(
                target.address, target.headers, wanted.model, wanted.version, inputs, wanted.parameters
            )
        tensors = tuple(_tensors(model, request))
        if regions is not None:
            tensors = regions.inputs(tensors)
        asked = BenchRequest(wanted.model, wanted.version, tensors, outputs, wanted.parameters)
        if target.protocol == "grpc":
            return GrpcInferForm(asked, wanted.streaming)
        return HttpInferForm(target.address, target.headers, asked)

    return form


def _tensors(model: ModelDescription, request: Request) -> Iterator[BenchTensor]:
    described = {tensor.name: tensor for tensor in model.inputs}
    for name, value in request.items():
        datatype, array = to_tensor(described[name], value)
        raw = encode_bytes(array) if datatype is dtypes.BYTES else bytes(buffer_of(array, datatype))
        yield BenchTensor(name, datatype.name, array.shape, raw)


def _as_json(value: Array) -> Any:
    """Return an input as the generate extension takes it: a list, or a scalar for a single element."""
    return to_json(value.flat[0] if value.size == 1 else value.ravel())
