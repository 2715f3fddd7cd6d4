"""From what a user wants to the requests that are sent: asks the server about the model, and makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from nerite.bench import data
from nerite.bench.data import Request, Shapes
from nerite.bench.forms import grpc, http
from nerite.bench.forms.tensor import Asked, Output, Tensor
from nerite.bench.plan import Plan, Protocol
from nerite.bench.scripts import Form, Scripts, Turns
from nerite.bench.server import Server
from nerite.client import ClientError, Model
from nerite.client.address import Address
from nerite.client.conversion import to_tensor
from nerite.core import dtype as dtypes
from nerite.core.tensor import buffer_of, encode_bytes

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


@dataclass(frozen=True, slots=True)
class Target:
    """Where it is asked, and how."""

    protocol: Protocol
    address: Address
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0
    verify: bool = True

    def plan(self, scripts: Scripts = _NOTHING, *, streaming: bool = False, decoupled: bool = False) -> Plan:
        """Return what generators are told."""
        return Plan(self.protocol, self.address, scripts, self.headers, streaming, decoupled, self.timeout, self.verify)


def prepared(wanted: Wanted, target: Target, server: Server) -> Plan:
    """Return a plan for a model that the server has. Raises ``ClientError``."""
    model = server.model(wanted.model, wanted.version)
    config = server.config(wanted.model, wanted.version)
    shapes = _shapes(wanted, model, int(config.get("max_batch_size", 0)))
    optional = {entry["name"] for entry in config.get("input", ()) if entry.get("optional")}
    if isinstance(wanted.data, Path):
        sequences = data.read(wanted.data, model, shapes)
    else:
        needed = [tensor for tensor in model.inputs if tensor.name not in optional]
        sequences = [[data.made_up(needed, shapes, zero=wanted.data == "zero")]]
    forms = [[_form(wanted, target, model, request) for request in sequence] for sequence in sequences]
    return target.plan(Turns([form.plain() for sequence in forms for form in sequence]))


def _shapes(wanted: Wanted, model: Model, most: int) -> Shapes:
    if wanted.batch > max(most, 1):
        limit = f"takes batches of at most {most}" if most else "takes no batches"
        raise ClientError(f"model '{model.name}' {limit}, and not of {wanted.batch}")
    known = [tensor.name for tensor in model.inputs]
    for name in wanted.shapes:
        if name not in known:
            raise ClientError(f"model '{model.name}' has no input '{name}'. Its inputs: {', '.join(known)}")
    return Shapes(wanted.batch if most else 0, wanted.shapes)


def _form(wanted: Wanted, target: Target, model: Model, request: Request) -> Form:
    described = {tensor.name: tensor for tensor in model.inputs}
    tensors = []
    for name, value in request.items():
        datatype, array = to_tensor(described[name], value)
        raw = encode_bytes(array) if datatype is dtypes.BYTES else bytes(buffer_of(array, datatype))
        tensors.append(Tensor(name, datatype.name, array.shape, raw))
    asked = Asked(wanted.model, wanted.version, tuple(tensors), tuple(map(Output, wanted.outputs)))
    if target.protocol == "grpc":
        return grpc.InferForm(asked)
    return http.InferForm(target.address, target.headers, asked)
