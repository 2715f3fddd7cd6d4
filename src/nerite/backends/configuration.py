"""What a configuration says of a model, as several backends read it. Pure, but for a look for files beside the model.

``config`` is in JSON form, and an entry is one of ``input`` or ``output``, or is made like one (``sequence_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from nerite.backends.interface import ModelContext
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.signature import reshaped
from nerite.core.tensor import DataType

# Values of configuration parameters and backend settings, which are all strings.

_T = TypeVar("_T")
_TRUE = frozenset({"true", "on", "1"})
_FALSE = frozenset({"false", "off", "0"})
_LARGEST: Final = 2**31 - 1
"""Frameworks take no larger numbers."""


def boolean_parameter(text: str) -> bool:
    """Read ``true``, ``on``, ``1`` or their opposites. Raises ``InvalidArgument`` for anything else."""
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise InvalidArgument(f"failed to convert '{text}' to boolean")
    return lowered in _TRUE


def integer_parameter(text: str) -> int:
    """Read a whole number of 32 bits. Raises ``InvalidArgument`` for anything else."""
    try:
        number = int(text)
    except ValueError:
        number = _LARGEST + 1
    if abs(number) > _LARGEST:
        raise InvalidArgument(f"failed to convert '{text}' to integral number")
    return number


def parameter(context: ModelContext, key: str, default: str, read: Callable[[str], _T], expected: str) -> _T:
    """Return a model's parameter as ``read`` reads it. Raises ``InvalidArgument``, with ``expected``: what it takes."""
    try:
        return read(context.parameter(key, default))
    except InvalidArgument as error:
        raise placed(error, context, key, expected) from None


def flag(context: ModelContext, key: str, *, default: bool) -> bool:
    """Return a model's parameter that is true or false. Raises ``InvalidArgument``."""
    return parameter(context, key, str(default), boolean_parameter, "true or false")


def thread_count(context: ModelContext, key: str) -> int:
    """Return a model's parameter for a number of threads, 0 where it does not say. Raises ``InvalidArgument``."""
    return parameter(context, key, "0", integer_parameter, "a number of threads, or 0")


def placed(error: NeriteError, context: ModelContext, key: str, expected: str, accelerator: str = "") -> NeriteError:
    """Return an error about a value, with the parameter of the model, or its accelerator, and what that takes."""
    owner = f"accelerator '{accelerator}' of " if accelerator else ""
    return error.prefixed("", f", in parameter '{key}' of {owner}model '{context.name}', which takes {expected}")


def setting(context: ModelContext, key: str, default: str, read: Callable[[str], _T], expected: str) -> _T:
    """Return what ``--backend-config`` says, as ``read`` reads it. Raises ``InvalidArgument``, as ``parameter``."""
    try:
        return read(context.settings.get(key, default))
    except InvalidArgument as error:
        backend = context.config.get("backend", "")
        raise error.prefixed("", f", in --backend-config={backend},{key}=…, which takes {expected}") from None


def default_batch_size(context: ModelContext, default: int) -> int:
    """Return the ``max_batch_size`` of models that can batch and do not say how much. Raises ``InvalidArgument``."""
    return setting(context, "default-max-batch-size", str(default), integer_parameter, "a number of rows")


# What a sequence model takes and gives beside the inputs and outputs that its configuration declares for callers.
#
# The server makes these inputs, and takes these outputs out of responses. To a backend they are tensors like any
# other: what is returned here has the form of an entry of ``input`` or ``output``; that of a control has its
# ``kind``, too.

_TYPES = {
    "int32_false_true": "TYPE_INT32",
    "fp32_false_true": "TYPE_FP32",
    "bool_false_true": "TYPE_BOOL",
}


def control_inputs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the inputs that tell a model of its sequence; ``config`` is in JSON form."""
    return [
        {"name": tensor["name"], "data_type": _control_type(control), "dims": [1], "kind": control["kind"]}
        for tensor in _batching(config).get("control_input", ())
        for control in tensor.get("control", ())
    ]


def state_inputs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the inputs that hold what the last request of the sequence left."""
    return [_state(state, "input_name") for state in _batching(config).get("state", ())]


def state_outputs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the outputs that are left for the next request, but for those that callers may ask for, too."""
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
    """Return whether the first dimension of the model's tensors is that of the batch."""
    return int(config.get("max_batch_size", 0)) > 0


def all_inputs(config: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of what a model is given: inputs, controls and states of sequences."""
    return [*config.get("input", ()), *made_inputs(config)]


def made_inputs(config: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of what the server gives a model, and no caller sends."""
    return [*control_inputs(config), *state_inputs(config)]


def all_outputs(config: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of what a model gives: outputs, and states that are none."""
    return [*config.get("output", ()), *state_outputs(config)]


def model_dims(entry: Entry) -> tuple[int, ...]:
    """Return the dims of an entry as the model has them: its ``reshape``, if it has one. Empty where it has none."""
    reshape = entry.get("reshape")
    dims = entry.get("dims", ()) if reshape is None else reshape.get("shape", ())
    return tuple(int(dim) for dim in dims)


def instance_count(config: Mapping[str, Any], default: int = 1) -> int:
    """Return how many instances there will be, on all devices; ``default`` without instance groups."""
    groups: Sequence[Mapping[str, Any]] = config.get("instance_group", ())
    if not groups:
        return default
    return max(1, sum(int(group.get("count", 1)) * max(1, len(group.get("gpus", ()))) for group in groups))


def op_libraries(context: ModelContext) -> tuple[str, ...]:
    """Return the paths of libraries of custom operators; one that lies with the model is found by its name alone."""
    names = context.config.get("model_operations", {}).get("op_library_filename", ())
    return tuple(str(beside) if (beside := context.directory / name).exists() else str(name) for name in names)


# Where a client's tensor and the model's meet: one port an input or output, with both shapes. Pure.

Shape = tuple[int, ...]


class TensorPort(NamedTuple):
    """A declared input or output. Shapes are without the batch dimension."""

    name: str
    datatype: DataType
    dims: Shape
    """As clients send or get it."""
    model_dims: Shape
    """As the model takes or gives it: the ``reshape`` of the configuration, or nothing for a scalar."""
    batching: bool
    ragged: bool = False
    """The rows of a batch differ in length and are handed over as one flat array."""

    def to_model(self, shape: Shape) -> Shape:
        """Return the model's shape for a client's ``shape``."""
        return self._converted(shape, self.dims, self.model_dims)

    def to_client(self, shape: Shape) -> Shape:
        """Return the client's shape for one that the model gave."""
        return self._converted(shape, self.model_dims, self.dims)

    def _converted(self, shape: Shape, have: Shape, want: Shape) -> Shape:
        return shape if have == want else reshaped(shape, have, want, batched=self.batching)


def of_entry(entry: Mapping[str, Any], *, batching: bool, scalar: bool = False) -> TensorPort:
    """Return the port for an entry of ``input`` or ``output``.

    ``scalar``: to the model it has no dimensions, though a configuration always gives it some.
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
