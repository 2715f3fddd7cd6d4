"""Opening plans, and having engines describe themselves: the one place that knows TensorRT's Python API of engines."""

from __future__ import annotations

import importlib
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from nerite.backends.tensorrt import plan_file
from nerite.backends.tensorrt.description import Description, EngineTensor, Profile, Range
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.errors import Internal, InvalidArgument, NotHere, Unsupported

_log = logging.getLogger("nerite.backends.tensorrt")

_DATATYPES: Final[Mapping[str, DataType]] = {
    "FLOAT": dtypes.FP32,
    "HALF": dtypes.FP16,
    "BF16": dtypes.BF16,
    "INT8": dtypes.INT8,
    "INT32": dtypes.INT32,
    "INT64": dtypes.INT64,
    "UINT8": dtypes.UINT8,
    "BOOL": dtypes.BOOL,
}
_REMEMBERED: Final = 8
"""Errors of TensorRT that are kept for whoever fails next."""
_opening: Final = threading.Lock()
"""One plan is opened at a time, so that what TensorRT says meanwhile is about this one."""


@cache
def tensorrt() -> Any:
    """Return TensorRT's module. Raises ``Unsupported`` where it cannot be imported."""
    try:
        return importlib.import_module("tensorrt")
    except Exception as error:  # It looks for its libraries while it is imported, and fails in many ways.
        raise NotHere(f"unable to import tensorrt ({error}): pip install 'nerite[tensorrt]'") from error


def open_engine(model: str, path: Path, plugins: Sequence[str], *, version_compatible: bool) -> Any:
    """Return an engine, on the GPU that this thread means. Raises ``NeriteError`` with what TensorRT says."""
    trt = tensorrt()
    with _opening:
        logger, runtime = _runtime()
        logger.errors.clear()
        for plugin in plugins:
            _load_plugin(plugin)
        runtime.engine_host_code_allowed = version_compatible
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is not None:
            return engine
        said = "; ".join(logger.errors) or "TensorRT gives no reason"
    made_by, installed = plan_file.version(path), trt.__version__
    remedy = ""
    if made_by and made_by.split(".")[:3] != installed.split(".")[:3]:
        remedy = (
            f". It was made with TensorRT {made_by}, and {installed} is installed: make it again, or for a plan that "
            "was made with --versionCompatible set --backend-config=tensorrt,version-compatible=true"
        )
    raise Internal(f"unable to create TensorRT engine: {said}. That is '{path}', of model '{model}'{remedy}")


def describe(model: str, engine: Any) -> Description:
    """Return what an engine says of itself. Raises ``Unsupported`` for tensors that clients cannot send or get."""
    trt = tensorrt()
    sides: dict[Any, list[EngineTensor]] = {trt.TensorIOMode.INPUT: [], trt.TensorIOMode.OUTPUT: []}
    count = max(engine.num_optimization_profiles, 1)
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        datatype = _DATATYPES.get(engine.get_tensor_dtype(name).name)
        if datatype is None:
            raise Unsupported(
                f"unable to load model '{model}': tensor '{name}' is of TensorRT's type "
                f"{engine.get_tensor_dtype(name).name}, which the protocol does not have"
            )
        if any(engine.get_tensor_format(name, profile) != trt.TensorFormat.LINEAR for profile in range(count)):
            raise Unsupported(
                f"unable to load model '{model}': tensor '{name}' is laid out as "
                f"{engine.get_tensor_format(name, 0).name}. Build the engine with linear inputs and outputs (trtexec: "
                "without --inputIOFormats and --outputIOFormats)"
            )
        on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
        dims = tuple(engine.get_tensor_shape(name))
        sides[engine.get_tensor_mode(name)].append(EngineTensor(name, datatype, dims, shape_values=on_host))
    inputs, outputs = sides.values()
    return Description(inputs, outputs, [_profile(engine, inputs, index) for index in range(count)])


def last_error() -> str:
    """Return what TensorRT said last of something that failed."""
    errors = _runtime()[0].errors
    return errors[-1] if errors else "TensorRT gives no reason"


def _profile(engine: Any, inputs: Sequence[EngineTensor], index: int) -> Profile:
    return {
        tensor.name: Range(*(tuple(shape) for shape in engine.get_tensor_profile_shape(tensor.name, index)))
        for tensor in inputs
        if not tensor.shape_values
    }


def _load_plugin(plugin: str) -> None:
    try:
        tensorrt().get_plugin_registry().load_library(plugin)
    except Exception as error:  # Whatever it raises says why.
        raise InvalidArgument(f"unable to load TensorRT plugin '{plugin}': {error}") from error


@cache
def _runtime() -> tuple[Any, Any]:
    """Return TensorRT's runtime and its logger, of which there is one in a process."""
    trt = tensorrt()

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        """Passes on what TensorRT says, and keeps what it says of errors."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=_REMEMBERED)

        def log(self, severity: Any, text: str) -> None:
            """Called by TensorRT, from any thread."""
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.errors.append(text)
                _log.error("TensorRT: %s", text)
            elif severity == trt.ILogger.Severity.WARNING:
                _log.warning("TensorRT: %s", text)
            else:
                _log.debug("TensorRT: %s", text)

    logger = Logger()
    trt.init_libnvinfer_plugins(logger, "")
    return logger, trt.Runtime(logger)
