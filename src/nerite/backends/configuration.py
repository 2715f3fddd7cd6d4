"""Reads model configurations for backends: parameters, settings, inputs, outputs, and the tensors of sequences.

``config`` is in JSON form. An entry is an element of ``input`` or ``output``, or has the same form. Pure, except that
``model_file`` and ``op_libraries`` look for files of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from nerite.backends import machine
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.core.signature import reshaped
from nerite.core.tensor import DataType

_T = TypeVar("_T")
_TRUE = frozenset({"true", "on", "1"})
_FALSE = frozenset({"false", "off", "0"})
_LARGEST: Final = 2**31 - 1
"""Largest number that frameworks accept."""


def boolean_parameter(text: str) -> bool:
    """Parse ``true``, ``on``, ``1`` or their opposites. Raises ``InvalidArgument`` for anything else."""
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise InvalidArgument(f"failed to convert '{text}' to boolean")
    return lowered in _TRUE


def integer_parameter(text: str) -> int:
    """Parse a 32-bit integer. Raises ``InvalidArgument`` for anything else."""
    try:
        number = int(text)
    except ValueError:
        number = _LARGEST + 1
    if abs(number) > _LARGEST:
        raise InvalidArgument(f"failed to convert '{text}' to integral number")
    return number


def parameter(context: ModelContext, key: str, default: str, read: Callable[[str], _T], expected: str) -> _T:
    """Return a model's parameter parsed by ``read``. Raises ``InvalidArgument``, which names what is ``expected``."""
    try:
        return read(context.parameter(key, default))
    except InvalidArgument as error:
        raise placed(error, context, key, expected) from None


def flag(context: ModelContext, key: str, *, default: bool) -> bool:
    """Return a boolean parameter of a model. Raises ``InvalidArgument``."""
    return parameter(context, key, str(default), boolean_parameter, "true or false")


def pins(config: Mapping[str, Any], side: str) -> bool:
    """Return whether a model's inputs or outputs, as ``side`` says, are copied by way of pinned memory."""
    buffer = config.get("optimization", {}).get(f"{side}_pinned_memory", {})
    return bool(buffer.get("enable", True))


def thread_count(context: ModelContext, key: str) -> int:
    """Return a model's parameter for a number of threads, 0 if it is not set. Raises ``InvalidArgument``."""
    return parameter(context, key, "0", integer_parameter, "a number of threads, or 0")


def placed(error: NeriteError, context: ModelContext, key: str, expected: str, accelerator: str = "") -> NeriteError:
    """Return an error about a value, completed by its parameter, the model or accelerator, and the expected values."""
    owner = f"accelerator '{accelerator}' of " if accelerator else ""
    return error.prefixed("", f", in parameter '{key}' of {owner}model '{context.name}', which takes {expected}")


def setting(context: ModelContext, key: str, default: str, read: Callable[[str], _T], expected: str) -> _T:
    """Return a ``--backend-config`` value parsed by ``read``. Raises ``InvalidArgument`` as ``parameter`` does."""
    try:
        return read(context.settings.get(key, default))
    except InvalidArgument as error:
        backend = context.config.get("backend", "")
        raise error.prefixed("", f", in --backend-config={backend},{key}=…, which takes {expected}") from None


def default_batch_size(context: ModelContext, default: int) -> int:
    """Return the ``max_batch_size`` for models that can batch but do not set one. Raises ``InvalidArgument``."""
    return setting(context, "default-max-batch-size", str(default), integer_parameter, "a number of rows")


# Additional tensors of sequence models: controls and states.
#
# The server creates these inputs, and removes these outputs from responses. To a backend they are ordinary tensors, so
# the functions return entries like those of ``input`` and ``output``; the entry of a control also has its ``kind``.

_TYPES = {
    "int32_false_true": "TYPE_INT32",
    "fp32_false_true": "TYPE_FP32",
    "bool_false_true": "TYPE_BOOL",
}


def control_inputs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the control inputs of a sequence model; ``config`` is in JSON form."""
    return [
        {"name": tensor["name"], "data_type": _control_type(control), "dims": [1], "kind": control["kind"]}
        for tensor in _batching(config).get("control_input", ())
        for control in tensor.get("control", ())
    ]


def state_inputs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the inputs that hold the states after the previous request of the sequence."""
    return [_state(state, "input_name") for state in _batching(config).get("state", ())]


def state_outputs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the outputs that become states for the next request, except those that callers may request as well."""
    declared = {output["name"] for output in config.get("output", ())}
    return [
        _state(state, "output_name")
        for state in _batching(config).get("state", ())
        if state["output_name"] not in declared
    ]


def _batching(config: Mapping[str, Any]) -> Mapping[str, Any]:
    batching: Mapping[str, Any] = config.get("sequence_batching") or {}
    return batching


def _control_type(control: Mapping[str, Any]) -> str:
    encoded = next((datatype for key, datatype in _TYPES.items() if control.get(key)), None)
    return encoded or str(control["data_type"])


def _state(state: Mapping[str, Any], side: str) -> Mapping[str, Any]:
    return {"name": state[side], "data_type": state["data_type"], "dims": state["dims"]}


Entry: TypeAlias = Mapping[str, Any]


def batching(config: Mapping[str, Any]) -> bool:
    """Return whether the first dimension of the model's tensors is the batch dimension."""
    return int(config.get("max_batch_size", 0)) > 0


def all_inputs(config: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of all inputs of a model: declared inputs, and controls and states of sequences."""
    return [*config.get("input", ()), *made_inputs(config)]


def made_inputs(config: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of the inputs that the server creates and callers never send."""
    return [*control_inputs(config), *state_inputs(config)]


def all_outputs(config: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of all outputs of a model: declared outputs, and states that are not declared as outputs."""
    return [*config.get("output", ()), *state_outputs(config)]


def model_dims(entry: Entry) -> tuple[int, ...]:
    """Return the dims of an entry for the model: its ``reshape`` if it has one, else its ``dims``; may be empty."""
    reshape = entry.get("reshape")
    dims = entry.get("dims", ()) if reshape is None else reshape.get("shape", ())
    return tuple(int(dim) for dim in dims)


def instance_count(config: Mapping[str, Any], default: int = 1) -> int:
    """Return the total number of instances on all devices; ``default`` without instance groups."""
    groups: Sequence[Mapping[str, Any]] = config.get("instance_group", ())
    if not groups:
        return default
    return max(1, sum(int(group.get("count", 1)) * max(1, len(group.get("gpus", ()))) for group in groups))


def first_instance(context: ModelContext) -> InstanceContext:
    """Return the device of the model's first instance, before there is one; on a GPU if any instance is."""
    groups: Sequence[Mapping[str, Any]] = context.config.get("instance_group") or ({},)
    group = next((group for group in groups if group.get("kind") == "KIND_GPU"), groups[0])
    kind = str(group.get("kind", "KIND_CPU")).removeprefix("KIND_")
    return InstanceContext(context.name, "CPU" if kind == "AUTO" else kind, next(iter(group.get("gpus", ())), 0))


def instance_cores(context: ModelContext, instance: InstanceContext, default: int = 1) -> int:
    """Return an instance's share of the cores: at least 1. ``default`` is the number of instances without groups.

    Frameworks default to a thread per core of the machine. In a server their threads compete with those of other
    instances, so each instance gets an equal share.
    """
    if instance.cores:
        return machine.core_share(instance)
    return max(1, machine.usable_cores() // instance_count(context.config, default))


def accelerators(context: ModelContext, kind: str) -> Sequence[Mapping[str, Any]]:
    """Return the execution accelerators of the configuration for ``kind``: ``cpu`` or ``gpu``."""
    found = context.config.get("optimization", {}).get("execution_accelerators", {})
    entries: Sequence[Mapping[str, Any]] = found.get(f"{kind}_execution_accelerator", ())
    return entries


def graph_level(context: ModelContext) -> int:
    """Return ``optimization.graph.level`` of the configuration: 0 if it is not set."""
    return int(context.config.get("optimization", {}).get("graph", {}).get("level", 0))


def model_path(context: ModelContext, default: str) -> Path:
    """Return the path of the model's artifact: ``default_model_filename``, or ``default``."""
    return context.version_directory / str(context.config.get("default_model_filename") or default)


def model_file(context: ModelContext, default: str) -> Path:
    """Return ``model_path``, which must be a file. Raises ``Unavailable`` if it is not."""
    path = model_path(context, default)
    if not path.is_file():
        raise missing(context, path)
    return path


def missing(context: ModelContext, path: Path) -> Unavailable:
    """Return the error for a model without its artifact."""
    return Unavailable(f"unable to find '{path}' for model instance '{context.name}'")


def op_libraries(context: ModelContext) -> tuple[str, ...]:
    """Return the paths of custom operator libraries; relative names are looked up in the model's directory first."""
    names = context.config.get("model_operations", {}).get("op_library_filename", ())
    return tuple(str(local) if (local := context.directory / name).exists() else str(name) for name in names)


Shape = tuple[int, ...]


class TensorPort(NamedTuple):
    """A declared input or output, with its shapes for clients and for the model, without the batch dimension."""

    name: str
    datatype: DataType
    dims: Shape
    """The dimensions as clients see them."""
    model_dims: Shape
    """The dimensions as the model sees them: the ``reshape`` of the configuration; empty for a scalar."""
    batching: bool
    ragged: bool = False
    """True if the rows of a batch may differ in length and are passed as one flat array."""

    def to_model(self, shape: Shape) -> Shape:
        """Return the model's shape for a client's ``shape``."""
        return self._converted(shape, self.dims, self.model_dims)

    def to_client(self, shape: Shape) -> Shape:
        """Return the client's shape for a ``shape`` from the model."""
        return self._converted(shape, self.model_dims, self.dims)

    def _converted(self, shape: Shape, have: Shape, want: Shape) -> Shape:
        return shape if have == want else reshaped(shape, have, want, batched=self.batching)


def of_entry(entry: Mapping[str, Any], *, batching: bool, scalar: bool = False) -> TensorPort:
    """Return the port for an entry of ``input`` or ``output``.

    ``scalar``: the model's tensor has no dimensions, although a configuration always declares some.
    """
    dims = tuple(int(dim) for dim in entry["dims"])
    return TensorPort(
        entry["name"],
        dtypes.BY_CONFIG_NAME[entry["data_type"]],
        dims,
        () if scalar else model_dims(entry),
        batching,
        bool(entry.get("allow_ragged_batch")),
    )
