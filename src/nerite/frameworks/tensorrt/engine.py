"""Opening plans, and having engines describe themselves: the one place that knows TensorRT's Python API of engines."""

from __future__ import annotations

import importlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.backends.arrays.graph import GraphTensor, ModelGraph
from nerite.backends.interface import ModelContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NotInstalled, Unavailable, Unsupported
from nerite.core.tensor import DataType

# What an engine says of itself. Pure.

Shape = tuple[int, ...]


class EngineTensor(NamedTuple):
    """An input or output of an engine; -1 stands for a size that a profile bounds, or that the data decides."""

    name: str
    datatype: DataType
    dims: Shape
    shape_values: bool = False
    """Its values are sizes, and it is in the memory of the host."""


class ShapeRange(NamedTuple):
    """The shapes of an input that a profile is for."""

    least: Shape
    best: Shape
    most: Shape


Profile = Mapping[str, ShapeRange]
"""The range of each input, by its name; not of inputs whose values are sizes."""


class EngineDescription(NamedTuple):
    """The tensors of an engine, in its order, and its profiles."""

    inputs: Sequence[EngineTensor]
    outputs: Sequence[EngineTensor]
    profiles: Sequence[Profile]

    @property
    def graph(self) -> ModelGraph:
        """The tensors, as configurations are compared with them."""
        inputs, outputs = (
            {tensor.name: GraphTensor(tensor.name, tensor.datatype, tensor.dims) for tensor in side}
            for side in (self.inputs, self.outputs)
        )
        return ModelGraph(inputs, outputs, {})

    @property
    def shape_tensors(self) -> frozenset[str]:
        """The names of the tensors whose values are sizes."""
        return frozenset(tensor.name for tensor in (*self.inputs, *self.outputs) if tensor.shape_values)


def largest_batch(profiles: Sequence[Profile]) -> int:
    """Return the rows of the largest batch that one of ``profiles`` takes."""
    return max(min((bounds.most[0] for bounds in profile.values()), default=0) for profile in profiles)


# The file of an engine: whether it is one, and which TensorRT made it. Pure, but for a look at the file.

_MARK: Final = b"ftrt"
"""At the beginning of every plan."""
_HEADER: Final = 28
_KNOWN_FORM: Final = b"\0\0\0\0"
"""After the mark: the one form in which the last four bytes of the header are known to be the version."""


def find_plan(context: ModelContext) -> Path:
    """Return the plan of a model. Raises ``Unavailable`` where it is missing, ``InvalidArgument`` if it is no plan."""
    path = context.version_directory / (context.config.get("default_model_filename") or "model.plan")
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{context.name}'")
    if not _head(path).startswith(_MARK):
        raise InvalidArgument(
            f"unable to load model '{context.name}': '{path}' is no TensorRT engine. Make one: "
            "trtexec --onnx=model.onnx --saveEngine=model.plan"
        )
    return path


def plan_version(path: Path) -> str:
    """Return the version of the TensorRT that made a plan; empty where its header has a form that we do not know."""
    head = _head(path)
    if len(head) < _HEADER or head[4:8] != _KNOWN_FORM:
        return ""
    return ".".join(map(str, head[24:28]))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEADER)


_log = logging.getLogger("nerite.frameworks.tensorrt")

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
        raise NotInstalled(f"unable to import tensorrt ({error}): pip install 'nerite[tensorrt]'") from error


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
    made_by, installed = plan_version(path), trt.__version__
    remedy = ""
    if made_by and made_by.split(".")[:3] != installed.split(".")[:3]:
        remedy = (
            f". It was made with TensorRT {made_by}, and {installed} is installed: make it again, or for a plan that "
            "was made with --versionCompatible set --backend-config=tensorrt,version-compatible=true"
        )
    raise Internal(f"unable to create TensorRT engine: {said}. That is '{path}', of model '{model}'{remedy}")


def describe(model: str, engine: Any) -> EngineDescription:
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
    return EngineDescription(inputs, outputs, [_profile(engine, inputs, index) for index in range(count)])


def last_error() -> str:
    """Return what TensorRT said last of something that failed."""
    errors = _runtime()[0].errors
    return errors[-1] if errors else "TensorRT gives no reason"


def _profile(engine: Any, inputs: Sequence[EngineTensor], index: int) -> Profile:
    return {
        tensor.name: ShapeRange(*(tuple(shape) for shape in engine.get_tensor_profile_shape(tensor.name, index)))
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


# Which of an engine's optimisation profiles an instance has, and which of these takes a batch. Pure.


def of_group(model: str, group: Mapping[str, Any], there: int) -> tuple[int, ...]:
    """Return the indices of the profiles that an instance group names; the first, where it names none.

    ``there``: how many the engine has. Raises ``InvalidArgument`` for one that it does not have.
    """
    chosen = []
    for word in group.get("profile") or ("0",):
        if not word.isdecimal() or int(word) >= there:
            has = "the profile 0 alone" if there == 1 else f"the profiles 0 to {there - 1}"
            raise InvalidArgument(
                f"unable to load model '{model}', instance group '{group.get('name', '')}' has profile: \"{word}\", "
                f"and the engine has {has}"
            )
        chosen.append(int(word))
    return tuple(dict.fromkeys(chosen))


def group_of(config: Mapping[str, Any], instance: str) -> Mapping[str, Any]:
    """Return the instance group that an instance is of, by its name: that of the group and a number."""
    groups: Sequence[Mapping[str, Any]] = config.get("instance_group") or ({},)
    name = instance.rpartition("_")[0]
    return next((group for group in groups if group.get("name") == name), groups[0])


def choose_profile(model: str, profiles: Mapping[int, Profile], shapes: Mapping[str, Shape]) -> int:
    """Return the index of the profile that was made for shapes the most like ``shapes``, of those that take them.

    Raises ``InvalidArgument`` where none does.
    """
    fitting = [index for index, profile in profiles.items() if not any(_breaches(profile, shapes))]
    if not fitting:
        name, detail = next(breach for profile in profiles.values() for breach in _breaches(profile, shapes))
        others = "" if len(profiles) == 1 else f". None of the profiles {', '.join(map(str, profiles))} takes it"
        raise InvalidArgument(
            f"request specifies invalid shape for input '{name}' for {model}. Error details: {detail}{others}"
        )
    return min(fitting, key=lambda index: _distance(profiles[index], shapes))


def _breaches(profile: Profile, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield the inputs that a profile does not take, and why."""
    for name, bounds in profile.items():
        shape = shapes[name]
        if len(shape) != len(bounds.most):
            yield name, f"model expected {len(bounds.most)} dimensions but received {len(shape)} dimensions"
            continue
        for place, (size, least, most) in enumerate(zip(shape, bounds.least, bounds.most, strict=True)):
            if not least <= size <= most:
                yield (
                    name,
                    f"model expected the shape of dimension {place} to be between {least} and {most} but received "
                    f"{size}",
                )


def _distance(profile: Profile, shapes: Mapping[str, Shape]) -> int:
    return sum(
        abs(size - best)
        for name, bounds in profile.items()
        for size, best in zip(shapes[name], bounds.best, strict=True)
    )
