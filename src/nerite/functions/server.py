"""``nerite.Server``: a server inside a program, and its models as objects to call."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from nerite.cli.command import UsageError
from nerite.cli.command_line import NERITE, EntryPoint, parse_command_line
from nerite.client import TensorDescription
from nerite.client.connection import ClientError
from nerite.client.tensors import to_tensor, widened
from nerite.config.options import ServerOptions
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.request import RequestHeader
from nerite.core.response import InferenceResponse, Parameter
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import Array, Buffer, TensorSpec, buffer_of, encode_bytes, to_array
from nerite.functions.annotations import FunctionMistake
from nerite.functions.embedded import EmbeddedServer, InferenceCall, only
from nerite.functions.execution import model_class_of
from nerite.functions.model_directory import write_registered
from nerite.functions.model_function import ModelFunction
from nerite.functions.registered import register, unregister
from nerite.functions.signature import ValueForm
from nerite.functions.values import argument_of, encoded_image

_PORTS: Final = ("http", "grpc", "metrics")
_DEFINED: Final = {
    "sequence_id": "sequence_id",
    "sequence_start": "sequence_start",
    "sequence_end": "sequence_end",
    "priority": "priority",
    "timeout": "timeout_us",
}
"""Parameters of a request that the protocol defines, and the fields of its header."""


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as flags of ``nerite serve``: ``http_port=9000`` as ``--http-port=9000``."""
    flags: list[str] = []
    for name, value in settings.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            text = str(each).lower() if isinstance(each, bool) else str(each)
            flags.append(f"--{name.replace('_', '-')}={text}")
    return flags


def options_of(
    flags: Sequence[str], environment: Mapping[str, str] = MappingProxyType({}), entry: EntryPoint = NERITE
) -> ServerOptions:
    """Return the options that flags and variables set. Raises ``InvalidArgument``."""
    try:
        return parse_command_line(flags, environment, entry).options
    except UsageError as error:
        raise InvalidArgument(f"{error.text} {error.remedy}".strip()) from None


class Server:
    """A server in this process: functions, and the models of repositories. Thread-safe; a context manager.

    No port is open unless a flag asks for one: ``http_port``, ``grpc_port``, ``metrics_port``; 0 is any free port.
    Other keyword arguments are flags of ``nerite serve``, too. Functions run in threads of this process.
    """

    def __init__(self, *models: ModelFunction[..., Any] | str | Path, **flags: Any) -> None:
        """``models``: functions that are decorated with ``@nerite.model``, and directories of repositories.

        Raises ``FunctionMistake`` and ``InvalidArgument``.
        """
        self._functions: dict[str, ModelFunction[..., Any]] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="nerite-functions-"))
        self._keys: dict[str, str] = {}
        repositories: list[str] = []
        opened = {f"allow_{name}": f"{name}_port" in flags or bool(flags.get(f"allow_{name}")) for name in _PORTS}
        options = options_of([f"--model-repository={self._directory}", *flags_of({**flags, **opened})])
        for each in models:
            if isinstance(each, str | Path):
                repositories.append(str(each))
            elif isinstance(each, ModelFunction):
                self._write(each)
            else:
                raise FunctionMistake(f"{each!r} is not a model: decorate it with @nerite.model")
        self._repositories = repositories
        self._embedded = EmbeddedServer(self._embedded_options(options, flags))

    def _embedded_options(self, options: ServerOptions, flags: Mapping[str, Any]) -> ServerOptions:
        repository = replace(
            options.repository,
            paths=tuple(sorted({*options.repository.paths, *self._repositories})),
            control_mode="explicit",
            startup_models=("*",),
        )
        quiet = options.log if any(name.startswith("log_") for name in flags) else replace(options.log, info=False)
        return replace(options, repository=repository, log=quiet)

    def start(self) -> Server:
        """Start, and return when all models are loaded. Raises ``NeriteError`` with what is wrong."""
        try:
            self._embedded.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop gracefully. Idempotent."""
        self._embedded.stop()
        for key in self._keys.values():
            unregister(key)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def add(self, function: ModelFunction[..., Any]) -> InProcessModel:
        """Load one more function while the server runs, or another one of the same name in its place."""
        self._write(function)
        self.load(function.name)
        return self.model(function.name)

    def load(self, name: str) -> None:
        """Load or reload a model. Raises ``NeriteError``."""
        self._embedded.run(lambda: self._embedded.server.load(name, {}))

    def unload(self, name: str) -> None:
        """Unload a model. Raises ``NeriteError``."""
        self._embedded.run(lambda: self._embedded.server.unload(name, {}))

    def model(self, name: str, version: str = "") -> InProcessModel:
        """Return a model to call. Raises ``NeriteError`` if it is not ready."""
        return InProcessModel(self._embedded, name, version, self._functions.get(name))

    @property
    def client(self) -> ModelsByName:
        """The models as attributes: ``server.client.double(x)``."""
        return ModelsByName(self)

    @property
    def embedded(self) -> EmbeddedServer:
        """The thread that runs the server."""
        return self._embedded

    @property
    def ports(self) -> dict[str, int]:
        """Numbers of the open ports: ``HTTP``, ``gRPC``, ``metrics``."""
        return dict(self._embedded.ports)

    @property
    def url(self) -> str:
        """URL of the HTTP port. Raises ``InvalidArgument`` if none is open."""
        if "HTTP" not in self._embedded.ports:
            raise InvalidArgument("no port is open: start the server with http_port=8000, or 0 for any free port")
        return f"http://127.0.0.1:{self._embedded.ports['HTTP']}"

    def _write(self, function: ModelFunction[..., Any]) -> None:
        key = register(model_class_of(function))
        write_registered(self._directory, function.name, key, function.config())
        if (before := self._keys.get(function.name)) is not None:
            unregister(before)
        self._keys[function.name] = key
        self._functions[function.name] = function


class ModelsByName:
    """The models of a server as attributes."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> InProcessModel:
        try:
            return self._server.model(name)
        except NeriteError as error:
            raise AttributeError(error.message) from None

    def __getitem__(self, name: str) -> InProcessModel:
        return self._server.model(name)


class InProcessModel:
    """A model of a server in this process. Thread-safe."""

    def __init__(
        self, embedded: EmbeddedServer, name: str, version: str = "", function: ModelFunction[..., Any] | None = None
    ) -> None:
        """Raises ``NeriteError`` if it is not ready."""
        self.name = name
        self._version = version
        self._embedded = embedded
        self._function = function

        async def signature() -> Signature:
            return embedded.server.signature(name, version)

        self._signature = embedded.run(signature)
        self._batched = self._signature.max_batch_size > 0

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the model; return what the function returns, or the outputs of another model by name.

        A value without the batch dimension gets one of 1, which the result has not. Raises ``NeriteError``.
        """
        header, data, single = self._request(self._named(args, inputs), {})
        return self._result(only(list(self._embedded.infer(header, data).all())), single)

    def infer(
        self, inputs: Mapping[str, Any] | None = None, *, parameters: Mapping[str, Parameter] | None = None, **more: Any
    ) -> dict[str, Array]:
        """Run the model; return its outputs by name, as arrays. Raises ``NeriteError``."""
        call = self._start({**(inputs or {}), **more}, parameters)
        return outputs_of(only(list(call.all())))

    async def infer_async(
        self, inputs: Mapping[str, Any] | None = None, *, parameters: Mapping[str, Parameter] | None = None, **more: Any
    ) -> dict[str, Array]:
        """Run the model without blocking the caller's event loop. As ``infer``."""
        call = self._start({**(inputs or {}), **more}, parameters)
        return outputs_of(only([each async for each in call.all_async()]))

    def stream(
        self, inputs: Mapping[str, Any] | None = None, *, parameters: Mapping[str, Parameter] | None = None, **more: Any
    ) -> Iterator[Any]:
        """Run the model; yield each response as it arrives: what the generator yields. Closing it cancels the rest."""
        call = self._start({**(inputs or {}), **more}, parameters)
        return (self._result(each, False) for each in call.all())

    async def stream_async(
        self, inputs: Mapping[str, Any] | None = None, *, parameters: Mapping[str, Parameter] | None = None, **more: Any
    ) -> AsyncIterator[Any]:
        """Yield each response without blocking the caller's event loop. As ``stream``."""
        call = self._start({**(inputs or {}), **more}, parameters)
        async for each in call.all_async():
            yield self._result(each, False)

    def _start(self, inputs: Mapping[str, Any], parameters: Mapping[str, Parameter] | None) -> InferenceCall:
        header, data, _ = self._request(inputs, parameters or {})
        return self._embedded.infer(header, data)

    def _named(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        names = list(self._signature.inputs)
        if self._function is not None and self._function.signature.records:
            raise InvalidArgument(f"'{self.name}' takes a dataclass: name its fields, as in {names[0]}=…")
        if len(args) > len(names):
            raise InvalidArgument(f"'{self.name}' has {len(names)} inputs, and was given {len(args)} values")
        return {**dict(zip(names, args, strict=False)), **inputs}

    def _request(
        self, inputs: Mapping[str, Any], parameters: Mapping[str, Parameter]
    ) -> tuple[RequestHeader, list[Buffer], bool]:
        specs: list[TensorSpec] = []
        data: list[Buffer] = []
        single = False
        for name, value in inputs.items():
            declared = self._signature.inputs.get(name)
            if declared is None:
                known = ", ".join(self._signature.inputs)
                raise InvalidArgument(f"model '{self.name}' has no input '{name}'. Its inputs: {known}")
            value = self._sendable(name, value)
            single = self._batched and np.ndim(value) < self._rank(declared)
            datatype, array = self._tensor(declared, value)
            specs.append(TensorSpec(name, datatype, array.shape))
            data.append(encode_bytes(array) if datatype is dtypes.BYTES else buffer_of(array, datatype))
        defined = {_DEFINED[key]: value for key, value in parameters.items() if key in _DEFINED}
        custom = {key: value for key, value in parameters.items() if key not in _DEFINED}
        header = RequestHeader(self.name, self._version, specs, parameters=custom, **defined)  # type: ignore[arg-type]
        return header, data, single

    def _tensor(self, declared: SignatureInput, value: Any) -> tuple[dtypes.DataType, Array]:
        shape = (-1, *declared.dims) if self._batched else declared.dims
        try:
            return to_tensor(TensorDescription(declared.name, declared.datatype.name, shape), value)
        except ClientError as error:
            raise InvalidArgument(str(error)) from None

    def _rank(self, declared: SignatureInput) -> int:
        """Return the number of dimensions of a value with its batch."""
        return 1 + len(declared.dims) - (declared.dims == (1,) and self._is_scalar(declared.name))

    def _is_scalar(self, name: str) -> bool:
        tensors = self._function.signature.inputs if self._function is not None else ()
        return any(each.name == name and not each.type.dims for each in tensors)

    def _sendable(self, name: str, value: Any) -> Any:
        """Return a value for the wire: images as files."""
        tensors = self._function.signature.inputs if self._function is not None else ()
        if any(each.name == name and each.form is ValueForm.IMAGE for each in tensors):
            return [encoded_image(each) for each in value] if isinstance(value, list) else encoded_image(value)
        return value

    def _result(self, response: InferenceResponse, single: bool) -> Any:
        arrays = outputs_of(response)
        if self._function is None:
            return {name: array[0] for name, array in arrays.items()} if single else arrays
        signature = self._function.signature
        values = {each.name: argument_of(each, arrays[each.name], batched=self._batched) for each in signature.outputs}
        if single:
            values = {name: value[0] for name, value in values.items()}
        if signature.answer is not None:
            return signature.answer.record(**values)
        return tuple(values.values()) if len(values) > 1 else next(iter(values.values()))


def outputs_of(response: InferenceResponse) -> dict[str, Array]:
    """Return the outputs of a response by name, as views on its data. BF16 is returned as float32."""
    if response.header is None:
        raise Internal("the response has no outputs")
    found = {}
    for spec, data in zip(response.header.outputs, response.buffers, strict=True):
        found[spec.name] = as_array(spec, data)
    return found


def as_array(spec: TensorSpec, data: Buffer) -> Array:
    """Return an output as an array; BF16 as float32, which numpy has."""
    array = to_array(spec, data)
    return widened(array) if spec.datatype is dtypes.BF16 else array
