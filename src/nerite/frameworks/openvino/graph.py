"""Graph of an OpenVINO model under the names of the configuration; also the framework's import and its errors."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Final, NamedTuple, cast

from nerite.backends.arrays.graph import GraphTensor, ModelGraph
from nerite.backends.configuration import all_inputs, all_outputs, batching, model_dims
from nerite.backends.machine import importing, translating
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, NeriteError, Unsupported
from nerite.core.tensor import DataType

DATATYPES: Final[dict[str, DataType]] = {
    "boolean": dtypes.BOOL,
    "u8": dtypes.UINT8,
    "u16": dtypes.UINT16,
    "u32": dtypes.UINT32,
    "u64": dtypes.UINT64,
    "i8": dtypes.INT8,
    "i16": dtypes.INT16,
    "i32": dtypes.INT32,
    "i64": dtypes.INT64,
    "f16": dtypes.FP16,
    "f32": dtypes.FP32,
    "f64": dtypes.FP64,
    "bf16": dtypes.BF16,
    "string": dtypes.BYTES,
}
"""Data types of the protocol, by OpenVINO's names."""

Entry = Mapping[str, Any]


class OpenVinoPort(NamedTuple):
    """Input or output of a model, with its declaration in the configuration."""

    name: str
    position: int
    port: Any
    """An ``openvino.Output``."""
    entry: Entry | None
    """Entry of ``input`` or ``output``, a control or a state; None if the configuration does not declare it."""

    @property
    def element(self) -> str:
        """OpenVINO's name of the element type."""
        return str(self.port.element_type.type_name)

    @property
    def dims(self) -> tuple[int, ...] | None:
        """The full shape, -1 for any size; None if the number of dimensions is unknown."""
        shape = self.port.partial_shape
        return None if shape.rank.is_dynamic else tuple(d.get_length() if d.is_static else -1 for d in shape)


def inputs(model: Any, config: Mapping[str, Any]) -> list[OpenVinoPort]:
    """Return the inputs of a model, in its order."""
    return _sockets(model.inputs, all_inputs(config))


def outputs(model: Any, config: Mapping[str, Any]) -> list[OpenVinoPort]:
    """Return the outputs of a model, in its order."""
    return _sockets(model.outputs, all_outputs(config))


def declared_dims(entry: Entry, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape that an entry declares for the model: with ``reshape``, and with the batch dimension."""
    return (*((-1,) if batching(config) else ()), *model_dims(entry))


def graph_of_model(model: Any, config: Mapping[str, Any]) -> ModelGraph:
    """Return the graph of a model. Raises ``Unsupported`` for a type that the protocol lacks.

    The configuration may fix dimensions of outputs that are free in the model.
    """
    return ModelGraph(
        {socket.name: _tensor(socket, socket.dims) for socket in inputs(model, config)},
        {socket.name: _tensor(socket, _narrowed(socket, config)) for socket in outputs(model, config)},
        {},
    )


def _sockets(ports: Iterable[Any], entries: Iterable[Entry]) -> list[OpenVinoPort]:
    declared = {entry["name"]: entry for entry in entries}
    sockets: dict[str, OpenVinoPort] = {}
    for position, port in enumerate(ports):
        # A tensor may have several names, and be several outputs; in older versions of OpenVINO it could have none.
        names = [name for name in sorted(port.names) if name not in sockets] or [str(port.node.friendly_name)]
        name = next((name for name in names if name in declared), names[0])
        sockets[name] = OpenVinoPort(name, position, port, declared.get(name))
    return list(sockets.values())


def _narrowed(socket: OpenVinoPort, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    dims = socket.dims
    if socket.entry is None:
        return dims
    declared = declared_dims(socket.entry, config)
    if dims is None:
        return declared
    if len(dims) != len(declared):
        return dims
    return tuple(wanted if dim == -1 else dim for dim, wanted in zip(dims, declared, strict=True))


def _tensor(socket: OpenVinoPort, dims: Sequence[int] | None) -> GraphTensor:
    datatype = DATATYPES.get(socket.element)
    if datatype is None:
        raise Unsupported(
            f"tensor '{socket.name}' is of type {socket.element}, and the protocol has no data type for its elements. "
            "Declare it with the data_type that it is to be converted to"
        )
    if dims is None:
        raise Unsupported(f"the model does not say how many dimensions '{socket.name}' has: declare it, with its dims")
    return GraphTensor(socket.name, datatype, tuple(dims))


# The import of OpenVINO, its cores, and its errors.

_TELEMETRY: Final = "openvino_telemetry"
_importing = threading.Lock()

_PLACES: Final = re.compile(r"Exception from \S+:\d+:|Check '.*' failed at \S+:\d+:|FrontEnd API failed with \w+:")
"""Source locations before the text of a message."""


@cache
def openvino() -> ModuleType:
    """Import OpenVINO lazily and return it. Raises ``NotInstalled`` if it cannot be imported.

    On import it sends telemetry over the network, unless its telemetry package is missing: so that is hidden.
    """
    with _importing:
        installed = sys.modules.get(_TELEMETRY)
        sys.modules[_TELEMETRY] = cast(ModuleType, None)  # Makes its import fail, which OpenVINO handles.
        try:
            with importing("openvino", "openvino"):
                import openvino
        finally:
            del sys.modules[_TELEMETRY]
            if installed is not None:
                sys.modules[_TELEMETRY] = installed
    return openvino  # type: ignore[no-any-return]  # The package has no types.


@cache
def core(extension: str = "") -> Any:
    """Return the ``Core`` of all models, or of the models with the custom operators of ``extension``.

    It is never dropped: devices and libraries that it has loaded cannot be unloaded. Raises ``NeriteError``.
    """
    made = openvino().Core()
    if extension:
        remedy = f"Is '{extension}' built for it?"
        with translating(lambda error: translated(error, "loading custom CPU extensions", remedy)):
            made.add_extension(extension)
    return made


def translated(error: Exception, doing: str, remedy: str = "") -> NeriteError:
    """Translate an exception from OpenVINO into the error for clients and the log, without source locations."""
    if isinstance(error, NeriteError):
        return error
    lines = [_PLACES.sub("", line).strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line)
    if remedy:
        text = f"{text.rstrip('.!')}. {remedy}"
    return Internal(f"openvino error in {doing} : {text}")
