"""What is asked of a server: requests as plain data, and the scene they are asked in.

An exchange is a list of steps. ``ask.py`` plays it against one server; ``test_exam.py`` plays it against two and
compares the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from google.protobuf.message import Message

from nerite.wire import grpc_service


@dataclass(frozen=True)
class Scene:
    """A repository and the flags that both servers are started with."""

    name: str
    repository: str = "good"
    """A module of ``repositories/``."""
    models: tuple[str, ...] = ()
    """Which models of it; all where none is named."""
    second: tuple[str, ...] = ()
    """Models of it that also stand in a second repository; without any there is none."""
    flags: tuple[str, ...] = ()
    """``{models}`` in them is the path of the server's copy of the repository."""
    own_flags: tuple[str, ...] = ()
    """Those of a newer Triton than the one that is asked: for Nerite alone."""
    cloud: Literal["", "sagemaker", "vertex-ai"] = ""
    """Whose port is open beside the usual three."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that both servers are started with."""
    backends: tuple[str, ...] = ()
    """Backends written in Python, folders of ``backends/``."""


@dataclass(frozen=True)
class Http:
    """One HTTP request on a connection of its own."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    port: Literal["http", "metrics", "cloud"] = "http"
    version: str = "HTTP/1.1"

    def encode(self) -> bytes:
        """Return the bytes to send. ``Host`` and ``Content-Length`` are added where they are not given."""
        names = {name.lower() for name, _ in self.headers}
        lines = [f"{self.method} {self.path} {self.version}", "Host: localhost"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.body and not names & {"content-length", "transfer-encoding"}:
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


@dataclass(frozen=True)
class Session:
    """HTTP requests on one connection, each sent when the one before was answered: to the port of the first."""

    requests: tuple[Http, ...]


@dataclass(frozen=True)
class Raw:
    """Bytes for the HTTP port, sent at once, and how many answers to read from the connection."""

    data: bytes
    answers: int = 1


@dataclass(frozen=True)
class Grpc:
    """One unary call."""

    call: str
    """``ModelInfer`` for a call of the inference service, or a whole path."""
    message: Message | bytes
    metadata: tuple[tuple[str, str], ...] = ()
    compressed: bool = False


@dataclass(frozen=True)
class Stream:
    """One call of ModelStreamInfer: the requests, sent one after the other, and then the end."""

    messages: tuple[Message, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    gap: float = 0.0
    """Seconds between two requests."""


@dataclass(frozen=True)
class Scrape:
    """The metrics, as families whose names begin with ``prefix``."""

    prefix: str


@dataclass(frozen=True)
class Together:
    """Steps that run at the same time, each started ``gap`` seconds after the one before."""

    steps: tuple[Http | Grpc, ...]
    gap: float = 0.1


@dataclass(frozen=True)
class Eventually:
    """A step that is repeated until its answer satisfies ``until`` (or some seconds have passed)."""

    step: Http | Grpc | Scrape
    until: Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Change:
    """Something done to the server's copy of the repository."""

    what: Callable[[Path], object]


Step = Http | Session | Raw | Grpc | Stream | Scrape | Together | Eventually | Change
Exchanges = Mapping[str, Step | Sequence[Step]]


# ---- HTTP requests, written shortly ----

Json = dict[str, Any]


def get(path: str, **headers: str) -> Http:
    return Http("GET", path, headers=spelled(headers))


def post(path: str, body: Any = b"", **headers: str) -> Http:
    """A body that is not bytes is sent as JSON."""
    return Http("POST", path, body if isinstance(body, bytes) else dumped(body), spelled(headers))


def tensor(name: str, datatype: str, shape: Sequence[Any], data: Any = None, **parameters: Any) -> Json:
    """An input as it stands in the JSON; without data where it is None."""
    described: Json = {"name": name, "shape": list(shape), "datatype": datatype}
    if parameters:
        described["parameters"] = parameters
    if data is not None:
        described["data"] = data
    return described


def wanted(name: str, **parameters: Any) -> Json:
    """A requested output as it stands in the JSON."""
    return {"name": name, "parameters": parameters} if parameters else {"name": name}


def infer(model: str, *inputs: Json, headers: Mapping[str, str] | None = None, **top: Any) -> Http:
    """An inference with everything in the JSON. ``model`` may be ``name/versions/3``."""
    return post(f"/v2/models/{model}/infer", {"inputs": list(inputs), **top}, **(headers or {}))


def binary_infer(
    model: str,
    inputs: Sequence[Json],
    *blobs: bytes,
    header_length: str | None = "right",
    headers: Mapping[str, str] | None = None,
    **top: Any,
) -> Http:
    """An inference with tensors behind the JSON. Each input without data takes the next of ``blobs``.

    ``header_length`` is sent as it is, left out where it is None, and computed where it is ``right``.
    """
    sizes = iter(blobs)
    for described in inputs:
        if "data" not in described and "binary_data_size" not in described.get("parameters", {}):
            described.setdefault("parameters", {})["binary_data_size"] = len(next(sizes))
    head = dumped({"inputs": list(inputs), **top})
    extra = dict(headers or {})
    if header_length is not None:
        extra["Inference-Header-Content-Length"] = str(len(head)) if header_length == "right" else header_length
    return post(f"/v2/models/{model}/infer", head + b"".join(blobs), **extra)


def dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def spelled(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Header names from keyword arguments: ``accept_encoding`` is ``accept-encoding``."""
    return tuple((name.replace("_", "-"), value) for name, value in headers.items())


# ---- gRPC requests, written shortly ----


Input = grpc_service.ModelInferRequest.InferInputTensor
Wanted = grpc_service.ModelInferRequest.InferRequestedOutputTensor


def grpc_tensor(name: str, datatype: str, shape: Sequence[int], contents: Any = None, **parameters: Any) -> Input:
    """An input; ``contents`` is a dict such as ``{"int_contents": [1, 2]}``."""
    described = Input(name=name, datatype=datatype, shape=shape)
    if contents is not None:
        described.contents.CopyFrom(grpc_service.InferTensorContents(**contents))
    fill(described.parameters, parameters)
    return described


def grpc_wanted(name: str, **parameters: Any) -> Wanted:
    described = Wanted(name=name)
    fill(described.parameters, parameters)
    return described


def infer_message(
    model: str, *inputs: Input, raw: Sequence[bytes] = (), outputs: Sequence[Wanted] = (), **top: Any
) -> Message:
    """A ModelInferRequest. ``top`` may have id, model_version and parameters."""
    parameters = top.pop("parameters", {})
    message = grpc_service.ModelInferRequest(
        model_name=model, inputs=inputs, raw_input_contents=raw, outputs=outputs, **top
    )
    fill(message.parameters, parameters)
    return message


def grpc_infer(model: str, *inputs: Input, metadata: Sequence[tuple[str, str]] = (), **rest: Any) -> Grpc:
    return Grpc("ModelInfer", infer_message(model, *inputs, **rest), tuple(metadata))


def fill(target: Any, parameters: Mapping[str, Any]) -> None:
    """Set parameters in their usual fields; a value ``("uint64", 3)`` names the field itself."""
    for name, value in parameters.items():
        kinds = {bool: "bool", int: "int64", str: "string", float: "double", bytes: "bytes"}
        kind, plain = value if isinstance(value, tuple) else (kinds[type(value)], value)
        setattr(target[name], f"{kind}_param", plain)
