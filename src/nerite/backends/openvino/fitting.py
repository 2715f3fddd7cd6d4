"""Making a model what its configuration says of it, as far as OpenVINO can: shapes, the batch, element types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nerite.backends.configuration import batching
from nerite.backends.interface import ModelContext
from nerite.backends.openvino import framework, graph
from nerite.backends.openvino.graph import Socket
from nerite.backends.openvino.properties import flag

_ELEMENTS: Final = {datatype.config_name: element for element, datatype in graph.DATATYPES.items()}


def fit(model: Any, context: ModelContext, config: Mapping[str, Any]) -> None:
    """Change ``model`` as ``config`` asks for. Raises ``NeriteError`` if it cannot be like that.

    - ``max_batch_size``: the first dimension becomes free;
    - ``RESHAPE_IO_LAYERS``: inputs get the shapes that are declared;
    - a ``data_type`` that differs between numbers: it is converted.
    """
    inputs = graph.inputs(model, config)
    reshaping = flag(context, "RESHAPE_IO_LAYERS")
    shapes = {}
    for socket in inputs:
        wanted = socket.dims
        if socket.entry is not None and (reshaping or wanted is None):
            wanted = graph.declared_dims(socket.entry, config)
        elif wanted and batching(config):
            wanted = (-1, *wanted[1:])
        if wanted is not None and wanted != socket.dims:
            shapes[socket.position] = wanted
    _reshape(model, shapes, "Leave RESHAPE_IO_LAYERS out" if reshaping else "Set max_batch_size: 0")
    _convert(model, config)


def has_batch_layout(model: Any) -> bool:
    """Return whether the model says, by its layouts, that the first dimension of everything is that of the batch."""
    helpers = framework.openvino().layout_helpers
    layouts = [helpers.get_layout(port) for port in (*model.inputs, *model.outputs)]
    return all(helpers.has_batch(layout) and helpers.batch_idx(layout) == 0 for layout in layouts)


def pad(model: Any, config: Mapping[str, Any]) -> None:
    """Fix the batch at its most: what is missing has to be filled up. Raises ``NeriteError``."""
    size = int(config["max_batch_size"])
    shapes = {socket.position: (size, *socket.dims[1:]) for socket in graph.inputs(model, config) if socket.dims}
    _reshape(model, shapes, "Leave ENABLE_BATCH_PADDING out")


def _reshape(model: Any, shapes: Mapping[int, tuple[int, ...]], remedy: str) -> None:
    if not shapes:
        return
    try:
        model.reshape({index: framework.openvino().PartialShape(list(dims)) for index, dims in shapes.items()})
    except Exception as error:  # Whatever the framework raises says why the model cannot have such shapes.
        raise framework.translated(error, "reshaping model", remedy) from error


def _convert(model: Any, config: Mapping[str, Any]) -> None:
    steps = framework.openvino().preprocess.PrePostProcessor(model)
    inputs = [socket for socket in graph.inputs(model, config) if _differs(socket)]
    outputs = [socket for socket in graph.outputs(model, config) if _differs(socket)]
    for socket in inputs:
        steps.input(socket.position).tensor().set_element_type(_wanted(socket))
    for socket in outputs:
        steps.output(socket.position).tensor().set_element_type(_wanted(socket))
    if inputs or outputs:
        try:
            steps.build()
        except Exception as error:  # Whatever the framework raises says why it cannot convert.
            raise framework.translated(error, "converting data types", "Declare those of the model") from error


def _differs(socket: Socket) -> bool:
    if socket.entry is None:
        return False
    wanted = _ELEMENTS[socket.entry["data_type"]]
    # Where one of them is a string, the agreement of configuration and model, which comes later, has the words for it.
    return wanted != socket.element and "string" not in (wanted, socket.element)


def _wanted(socket: Socket) -> Any:
    assert socket.entry is not None
    return getattr(framework.openvino().Type, _ELEMENTS[socket.entry["data_type"]])
