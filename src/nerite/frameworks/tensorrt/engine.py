"""Opens plans, describes engines as plain data, and chooses optimisation profiles."""

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
from nerite.backends.configuration import model_file
from nerite.backends.interface import ModelContext
from nerite.backends.machine import importing, translating
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.tensor import DataType

# Description of an engine. Pure.

Shape = tuple[int, ...]


class EngineTensor(NamedTuple):
    """Input or output of an engine; -1 is a size that a profile bounds, or that depends on the data."""

    name: str
    datatype: DataType
    dims: Shape
    shape_values: bool = False
    """True if its values are sizes; it is then in host memory."""


class ShapeRange(NamedTuple):
    """Shapes of an input that a profile supports."""

    least: Shape
    best: Shape
    most: Shape


Profile = Mapping[str, ShapeRange]
"""Range of each input by name, except for inputs whose values are sizes."""


class EngineDescription(NamedTuple):
    """Inputs and outputs of an engine, in its order, and its profiles."""

    inputs: Sequence[EngineTensor]
    outputs: Sequence[EngineTensor]
    profiles: Sequence[Profile]

    @property
    def graph(self) -> ModelGraph:
        """The inputs and outputs, for the comparison with a configuration."""
        inputs, outputs = (
            {tensor.name: GraphTensor(tensor.name, tensor.datatype, tensor.dims) for tensor in side}
            for side in (self.inputs, self.outputs)
        )
        return ModelGraph(inputs, outputs, {})

    @property
    def shape_tensors(self) -> frozenset[str]:
        """Names of the tensors whose values are sizes."""
        return frozenset(tensor.name for tensor in (*self.inputs, *self.outputs) if tensor.shape_values)


def largest_batch(profiles: Sequence[Profile]) -> int:
    """Return the number of rows of the largest batch that one of ``profiles`` takes."""
    return max(min((bounds.most[0] for bounds in profile.values()), default=0) for profile in profiles)


# The file of an engine, and the version of TensorRT that built it. Reads only the header.

_MAGIC: Final = b"ftrt"
_HEADER: Final = 28
_KNOWN_FORM: Final = b"\0\0\0\0"
"""Header format after the magic bytes whose last four bytes are known to be the version."""


def find_plan(context: ModelContext) -> Path:
    """Return the plan of a model. Raises ``Unavailable`` if it is missing, ``InvalidArgument`` if it is no plan."""
    path = model_file(context, "model.plan")
    if not _head(path).startswith(_MAGIC):
        raise InvalidArgument(
            f"unable to load model '{context.name}': '{path}' is no TensorRT engine. Make one: "
            "trtexec --onnx=model.onnx --saveEngine=model.plan"
        )
    return path


def plan_version(path: Path) -> str:
    """Return the version of TensorRT that built a plan; empty if the format of its header is unknown."""
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
_MAX_ERRORS: Final = 8
"""Number of recent errors of TensorRT that are kept for the next exception."""
_opening: Final = threading.Lock()
"""Serialises opening, so that errors that TensorRT logs meanwhile are about this plan."""


@cache
def tensorrt() -> Any:
    """Import TensorRT lazily and return it. Raises ``NotInstalled`` if it cannot be imported."""
    with importing("tensorrt", "tensorrt"):
        return importlib.import_module("tensorrt")


def open_engine(model: str, path: Path, plugins: Sequence[str], *, version_compatible: bool) -> Any:
    """Return an engine on the current GPU of this thread. Raises ``NeriteError`` with TensorRT's message."""
    trt = tensorrt()
    with _opening:
        logger, runtime = _runtime(trt)
        logger.errors.clear()
        for plugin in plugins:
            _load_plugin(plugin)
        runtime.engine_host_code_allowed = version_compatible
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is not None:
            return engine
        message = "; ".join(logger.errors) or "TensorRT gives no reason"
    made_by, installed = plan_version(path), trt.__version__
    remedy = ""
    if made_by and made_by.split(".")[:3] != installed.split(".")[:3]:
        remedy = (
            f". It was made with TensorRT {made_by}, and {installed} is installed: make it again, or for a plan that "
            "was made with --versionCompatible set --backend-config=tensorrt,version-compatible=true"
        )
    raise Internal(f"unable to create TensorRT engine: {message}. That is '{path}', of model '{model}'{remedy}")


def describe(model: str, engine: Any) -> EngineDescription:
    """Return the description of an engine. Raises ``Unsupported`` for tensors that the protocol cannot carry."""
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
    """Return the last error that TensorRT logged."""
    errors = _runtime(tensorrt())[0].errors
    return errors[-1] if errors else "TensorRT gives no reason"


def _profile(engine: Any, inputs: Sequence[EngineTensor], index: int) -> Profile:
    return {
        tensor.name: ShapeRange(*(tuple(shape) for shape in engine.get_tensor_profile_shape(tensor.name, index)))
        for tensor in inputs
        if not tensor.shape_values
    }


def _load_plugin(plugin: str) -> None:
    with translating(lambda error: InvalidArgument(f"unable to load TensorRT plugin '{plugin}': {error}")):
        tensorrt().get_plugin_registry().load_library(plugin)


@cache
def _runtime(trt: Any) -> tuple[Any, Any]:
    """Return the runtime and the logger of TensorRT, module ``trt``: one of each per process."""

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        """Forwards TensorRT's messages to our log, and keeps the errors."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=_MAX_ERRORS)

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


# Choosing optimisation profiles: those of an instance group, and the one for a batch. Pure.


def profiles_of_group(model: str, group: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the indices of the profiles that an instance group names; the first one if it names none.

    Raises ``InvalidArgument`` for a profile that the engine, which has ``count``, does not have.
    """
    chosen = []
    for word in group.get("profile") or ("0",):
        if not word.isdecimal() or int(word) >= count:
            has = "the profile 0 alone" if count == 1 else f"the profiles 0 to {count - 1}"
            raise InvalidArgument(
                f"unable to load model '{model}', instance group '{group.get('name', '')}' has profile: \"{word}\", "
                f"and the engine has {has}"
            )
        chosen.append(int(word))
    return tuple(dict.fromkeys(chosen))


def instance_groups(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the instance groups of a configuration: at least one."""
    groups: Sequence[Mapping[str, Any]] = config.get("instance_group") or ({},)
    return groups


def group_of(config: Mapping[str, Any], instance: str) -> Mapping[str, Any]:
    """Return the instance group of an instance, whose name is that of the group and a number."""
    groups = instance_groups(config)
    name = instance.rpartition("_")[0]
    return next((group for group in groups if group.get("name") == name), groups[0])


def choose_profile(model: str, profiles: Mapping[int, Profile], shapes: Mapping[str, Shape]) -> int:
    """Return the index of the profile that takes ``shapes`` and is optimised for the most similar ones.

    Raises ``InvalidArgument`` if no profile takes them.
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
    """Yield the inputs whose shapes a profile does not take, and why."""
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
