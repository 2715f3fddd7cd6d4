"""From what a user wants to the requests that are sent: asks the server about the model, and makes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from nerite.bench import data
from nerite.bench.data import Request, Shapes
from nerite.bench.forms import grpc, http
from nerite.bench.forms.tensor import Asked, Output, Tensor
from nerite.bench.plan import Plan, Protocol
from nerite.bench.scripts import Form, Scripts, Sequences, Turns
from nerite.bench.server import Server
from nerite.bench.shared_memory import Regions
from nerite.client import ClientError, Model
from nerite.client.address import Address
from nerite.client.conversion import to_json, to_tensor
from nerite.core import dtype as dtypes
from nerite.core.tensor import Array, buffer_of, encode_bytes

_NOTHING: Final = Turns(())


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be asked of a model."""

    model: str
    version: str = ""
    batch: int = 1
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    data: Path | Literal["random", "zero"] = "random"
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    streaming: bool = False
    sequence_length: int = 0
    """Requests of a sequence; 0 for none."""
    first_id: int = 1
    output_room: int = 0
    """Bytes of shared memory for each output."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where it is asked, and how."""

    protocol: Protocol
    address: Address
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0

    def plan(self, scripts: Scripts = _NOTHING, *, streaming: bool = False, decoupled: bool = False) -> Plan:
        """Return what generators are told."""
        return Plan(self.protocol, self.address, scripts, self.headers, streaming, decoupled, self.timeout)


def prepared(wanted: Wanted, target: Target, server: Server, regions: Regions | None = None) -> Plan:
    """Return a plan for a model that the server has, with tensors in ``regions``. Raises ``ClientError``."""
    model = server.model(wanted.model, wanted.version)
    config = server.config(wanted.model, wanted.version)
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
    if decoupled and not wanted.streaming:
        raise ClientError(f"model '{model.name}' answers in any number of responses: measure it with --streaming")
    batching = config.get("sequence_batching")
    if batching is not None and not batching.get("iterative_sequence") and not wanted.sequence_length:
        raise ClientError(f"model '{model.name}' takes sequences: say how long they are with --sequence-length")
    shapes = _shapes(wanted, model, int(config.get("max_batch_size", 0)))
    optional = {entry["name"] for entry in config.get("input", ()) if entry.get("optional")}
    if isinstance(wanted.data, Path):
        sequences = data.read(wanted.data, model, shapes)
    else:
        needed = [tensor for tensor in model.inputs if tensor.name not in optional]
        sequences = [[data.made_up(needed, shapes, zero=wanted.data == "zero")]]
    form = _forms(wanted, target, model, regions)
    forms = [[form(request) for request in sequence] for sequence in sequences]
    return target.plan(_scripts(wanted, forms), streaming=wanted.streaming, decoupled=decoupled)


def _scripts(wanted: Wanted, sequences: Sequence[Sequence[Form]]) -> Scripts:
    if not wanted.sequence_length:
        return Turns([form.plain() for sequence in sequences for form in sequence])
    if any(len(sequence) > 1 for sequence in sequences):
        return Sequences(sequences, wanted.first_id)
    # Data that are no sequences are cut into some.
    forms = itertools.cycle(form for sequence in sequences for form in sequence)
    length = wanted.sequence_length
    return Sequences([list(itertools.islice(forms, length)) for _ in sequences], wanted.first_id)


def _shapes(wanted: Wanted, model: Model, most: int) -> Shapes:
    if wanted.batch > max(most, 1):
        limit = f"takes batches of at most {most}" if most else "takes no batches"
        raise ClientError(f"model '{model.name}' {limit}, and not of {wanted.batch}")
    known = [tensor.name for tensor in model.inputs]
    for name in wanted.shapes:
        if name not in known:
            raise ClientError(f"model '{model.name}' has no input '{name}'. Its inputs: {', '.join(known)}")
    return Shapes(wanted.batch if most else 0, wanted.shapes)


def _forms(wanted: Wanted, target: Target, model: Model, regions: Regions | None) -> Callable[[Request], Form]:
    """Return what makes a request of its inputs."""
    names = wanted.outputs or [tensor.name for tensor in model.outputs]
    outputs = tuple(map(Output, wanted.outputs))
    if regions is not None and wanted.output_room:
        outputs = regions.outputs(names, wanted.output_room)

    def form(request: Request) -> Form:
        if wanted.streaming and target.protocol == "http":
            inputs = {name: _as_json(value) for name, value in request.items()}
            return http.GenerateForm(
                target.address, target.headers, wanted.model, wanted.version, inputs, wanted.parameters
            )
        tensors = tuple(_tensors(model, request))
        if regions is not None:
            tensors = regions.inputs(tensors)
        asked = Asked(wanted.model, wanted.version, tensors, outputs, wanted.parameters)
        if target.protocol == "grpc":
            return grpc.InferForm(asked, wanted.streaming)
        return http.InferForm(target.address, target.headers, asked)

    return form


def _tensors(model: Model, request: Request) -> Iterator[Tensor]:
    described = {tensor.name: tensor for tensor in model.inputs}
    for name, value in request.items():
        datatype, array = to_tensor(described[name], value)
        raw = encode_bytes(array) if datatype is dtypes.BYTES else bytes(buffer_of(array, datatype))
        yield Tensor(name, datatype.name, array.shape, raw)


def _as_json(value: Array) -> Any:
    """Return an input as the generate extension takes it: what is one element need be no list."""
    return to_json(value.flat[0] if value.size == 1 else value.ravel())
