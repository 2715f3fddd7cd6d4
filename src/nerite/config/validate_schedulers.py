"""Validates dynamic batching and sequence batching, including the control tensors and states of sequence models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

from nerite.config.mistake import FieldPath, Mistake
from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelQueuePolicy, ModelSequenceBatching
from nerite.config.signature import FOLDER

_DYNAMIC: Final = "dynamic_batching"
_SEQUENCE: Final = "sequence_batching"
_CORRID: Final = "CONTROL_SEQUENCE_CORRID"
_CONTROLS: Final[tuple[ModelSequenceBatching.Control.Kind, ...]] = (
    "CONTROL_SEQUENCE_START",
    "CONTROL_SEQUENCE_END",
    "CONTROL_SEQUENCE_READY",
    _CORRID,
)
_ENCODINGS: Final[tuple[Literal["int32_false_true", "fp32_false_true", "bool_false_true"], ...]] = (
    "int32_false_true",
    "fp32_false_true",
    "bool_false_true",
)
_CORRID_TYPES: Final = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check_dynamic_batching(config: ModelConfig) -> Iterator[Mistake]:
    """Find mistakes in ``dynamic_batching``."""
    batching, name = config.dynamic_batching, config.name
    if batching is None:
        return
    yield from _check_preferred(
        "dynamic batching preferred size",
        (_DYNAMIC, "preferred_batch_size"),
        batching.preferred_batch_size,
        config,
    )
    if batching.priority_levels:
        yield from _check_priorities(batching, name)
    if batching.preserve_ordering:
        yield from _check_ordering(batching, name)


def _check_preferred(subject: str, path: FieldPath, sizes: Iterable[int], config: ModelConfig) -> Iterator[Mistake]:
    largest = config.max_batch_size
    for index, size in enumerate(sizes):
        where = (*path, index)
        if size <= 0:
            remedy = "Remove 'preferred_batch_size', or write sizes from 1 to max_batch_size."
            yield Mistake(message=f"{subject} must be positive for {config.name}", path=where, remedy=remedy)
        elif size > largest:
            remedy = f"Write max_batch_size: {size}, or remove {size} here."
            yield Mistake(message=f"{subject} must be <= max batch size for {config.name}", path=where, remedy=remedy)


def _check_priorities(batching: ModelDynamicBatching, name: str) -> Iterator[Mistake]:
    levels, default = batching.priority_levels, batching.default_priority_level
    if not 1 <= default <= levels:
        yield Mistake(
            message=f"default priority level must be in range [1, {levels}] for {name}",
            path=(_DYNAMIC, "default_priority_level"),
            remedy=f"Write a default_priority_level from 1, the highest, to {levels}.",
        )
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            yield Mistake(
                message=f"priority queue policy must have priority level in range [1, {levels}] for {name}",
                path=(_DYNAMIC, "priority_queue_policy", level),
                remedy=f"Levels count from 1, the highest, to {levels}: write one of them as key, or use "
                "default_queue_policy for all levels.",
            )


def _check_ordering(batching: ModelDynamicBatching, name: str) -> Iterator[Mistake]:
    if batching.priority_levels > 1:
        yield Mistake(
            message=f"Only one priority level is allowed when 'preserve_ordering' is true for {name}",
            path=(_DYNAMIC, "priority_levels"),
            remedy="Remove 'preserve_ordering', or the priority levels.",
        )
    policies: list[tuple[FieldPath, ModelQueuePolicy]] = [
        ((_DYNAMIC, "priority_queue_policy", level), policy) for level, policy in batching.priority_queue_policy.items()
    ]
    if batching.default_queue_policy is not None:
        policies.insert(0, ((_DYNAMIC, "default_queue_policy"), batching.default_queue_policy))
    for path, policy in policies:
        if policy.default_timeout_microseconds and policy.timeout_action == "DELAY":
            yield Mistake(
                message="Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for "
                + name,
                path=(*path, "timeout_action"),
                remedy="Write timeout_action: REJECT, or remove 'preserve_ordering'.",
            )


def check_sequence_batching(config: ModelConfig) -> Iterator[Mistake]:
    """Find mistakes in ``sequence_batching``."""
    batching, name = config.sequence_batching, config.name
    if batching is None:
        return
    if config.response_cache is not None and config.response_cache.enable:
        yield Mistake(
            message=f"Response Cache does not currently support model {name} with sequence batching scheduler. "
            "Please disable the response cache.",
            path=("response_cache", "enable"),
            remedy="Remove 'response_cache'.",
        )
    for kind in _CONTROLS:
        yield from _check_control(batching, kind, name)
    if batching.oldest is not None:
        yield from _check_preferred(
            "sequence batching preferred batch size",
            (_SEQUENCE, "oldest", "preferred_batch_size"),
            batching.oldest.preferred_batch_size,
            config,
        )
    if batching.direct is not None and not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        yield Mistake(
            message=f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}",
            path=(_SEQUENCE, "direct", "minimum_slot_utilization"),
            remedy="Write the share of slots that have to be in use, as in: minimum_slot_utilization: 0.5",
        )


def _check_control(
    batching: ModelSequenceBatching, kind: ModelSequenceBatching.Control.Kind, name: str
) -> Iterator[Mistake]:
    """Find mistakes in controls of one kind; for the first kind, also in the control tensors."""
    tensors: set[str] = set()
    seen = False
    for index, tensor in enumerate(batching.control_input):
        path = (_SEQUENCE, "control_input", index)
        if kind == _CONTROLS[0]:
            yield from _check_tensor_name(tensor, tensors, path, name)
        for place, control in enumerate(tensor.control):
            if control.kind != kind:
                continue
            where = (*path, "control", place)
            if seen:
                yield Mistake(
                    message=f"sequence batching specifies multiple {kind} tensors for {name}",
                    path=(*where, "kind"),
                    remedy="Keep one control of this kind.",
                )
                continue
            seen = True
            check = _check_correlation_id if kind == _CORRID else _check_encoding
            yield from check(control, where, name)


def _check_tensor_name(
    control_input: ModelSequenceBatching.ControlInput, tensors: set[str], path: FieldPath, name: str
) -> Iterator[Mistake]:
    tensor = control_input.name
    if not tensor:
        message = f"sequence batching control tensor must have a name for {name}"
        yield Mistake(message=message, path=path, remedy='Write the name of the model\'s input: name: "…"')
    elif tensor in tensors or len(control_input.control) > 1:
        yield Mistake(
            message=f"sequence batching control tensor '{tensor}' is specified for multiple control kinds for {name}",
            path=(*path, "name"),
            remedy="Give each control an input of its own.",
        )
    tensors.add(tensor)


def _check_encoding(control: ModelSequenceBatching.Control, path: FieldPath, name: str) -> Iterator[Mistake]:
    tail = f"for {control.kind} for {name}"
    given = [encoding for encoding in _ENCODINGS if getattr(control, encoding)]
    if not given:
        yield Mistake(
            message="sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' {tail}",
            path=path,
            remedy="Write the two values that stand for false and true, as in: int32_false_true: [ 0, 1 ]",
        )
    elif len(given) > 1:
        yield Mistake(
            message="sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' {tail}",
            path=(*path, given[1]),
            remedy=f"Keep one of {' and '.join(given)}.",
        )
    elif len(getattr(control, given[0])) != 2:
        yield Mistake(
            message=f"sequence batching control '{given[0]}' must have exactly 2 entries {tail}",
            path=(*path, given[0]),
            remedy="Write the value for false and the value for true.",
        )


def _check_correlation_id(control: ModelSequenceBatching.Control, path: FieldPath, name: str) -> Iterator[Mistake]:
    if any(getattr(control, encoding) for encoding in _ENCODINGS):
        yield Mistake(
            message="sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' for {_CORRID} for {name}",
            path=path,
            remedy="Remove the values, and write data_type: TYPE_UINT64.",
        )
    if control.data_type not in _CORRID_TYPES:
        yield Mistake(
            message=f"unexpected data type for control {_CORRID} for {name}. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
            path=(*path, "data_type"),
            remedy="Write data_type: TYPE_UINT64, or another that is allowed.",
        )


def check_states(config: ModelConfig) -> Iterator[Mistake]:
    """Find mistakes in the states of a sequence model, and tensors that collide with an input or a state."""
    batching, model = config.sequence_batching, config.name
    if batching is None:
        return
    taken = {tensor.name: "an input of the model" for tensor in config.input}
    for index, control in enumerate(batching.control_input):
        path = (_SEQUENCE, "control_input", index, "name")
        yield from _check_name(f"control tensor '{control.name}'", control.name, taken, "a control tensor", path, model)
    left: dict[str, str] = {}
    for index, state in enumerate(batching.state):
        where: FieldPath = (_SEQUENCE, "state", index)
        yield from _check_state(state, where, model)
        for side, names in (("input_name", taken), ("output_name", left)):
            name = getattr(state, side)
            yield from _check_name(f"state '{name}'", name, names, "another state", (*where, side), model)
        yield from _check_initial(state, (*where, "initial_state"))


def _check_name(
    what: str, name: str, taken: dict[str, str], kind: str, path: FieldPath, model: str
) -> Iterator[Mistake]:
    """Find a name that another tensor has already; add it to ``taken``."""
    if name and name in taken:
        yield Mistake(
            message=f"sequence batching {what} is {taken[name]}, too, for {model}",
            path=path,
            remedy="Callers do not send what the server makes: remove one of the two, or write another name.",
        )
    taken.setdefault(name, kind)


def _check_state(state: ModelSequenceBatching.State, path: FieldPath, model: str) -> Iterator[Mistake]:
    for side, example in (("input_name", "input"), ("output_name", "output")):
        if not getattr(state, side):
            yield Mistake(
                message=f"sequence batching state must specify '{side}' for {model}",
                path=path,
                remedy=f'Write the name of the model\'s {example}: {side}: "…"',
            )
    if state.data_type == "TYPE_INVALID":
        yield Mistake(
            message=f"sequence batching state '{state.input_name}' must specify 'data_type' for {model}",
            path=path,
            remedy="Write its type, as in: data_type: TYPE_FP32",
        )
    for index, dim in enumerate(state.dims):
        if dim < -1:
            yield Mistake(
                message=f"sequence batching state '{state.input_name}' dimension must be integer >= 0, or -1 to "
                f"indicate a variable-size dimension for {model}",
                path=(*path, "dims", index),
                remedy=f"Write a size in place of {dim}, or -1 for any size.",
            )
    if state.use_growable_memory:
        yield Mistake(
            message=f"sequence batching state '{state.input_name}' uses 'use_growable_memory', which is not supported "
            f"for {model}",
            path=(*path, "use_growable_memory"),
            remedy="Remove it: a state may have another shape after each request without it.",
        )


def _check_initial(state: ModelSequenceBatching.State, path: FieldPath) -> Iterator[Mistake]:
    """Find mistakes in an initial state, in Triton's words. The content of a file is not checked."""
    name = state.input_name
    if len(state.initial_state) > 1:
        yield Mistake(
            message=f"initial_state field for state input '{name}' must contain exactly one or zero element. Found "
            f"'{len(state.initial_state)}' elements.",
            path=(*path, 1),
            remedy="Keep one: a state has one value before the first request.",
        )
        return
    for initial in state.initial_state:
        yield from _check_value(state, initial, (*path, 0))


def _check_value(
    state: ModelSequenceBatching.State, initial: ModelSequenceBatching.InitialState, path: FieldPath
) -> Iterator[Mistake]:
    name = state.input_name
    if initial.data_type != state.data_type:
        yield Mistake(
            message=f"The data type used for 'initial_state' field of state '{name}' does not match the state data "
            "type.",
            path=(*path, "data_type"),
            remedy=f"Write data_type: {state.data_type}, that of the state.",
        )
    if not initial.name:
        yield Mistake(
            message=f"Field 'name' must be set when using initial_state for state input '{name}'.",
            path=path,
            remedy='Write a name, any: name: "initial"',
        )
    if len(initial.dims) != len(state.dims):
        yield Mistake(
            message="Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state "
            f"input '{name}'. {len(initial.dims)} != {len(state.dims)}",
            path=(*path, "dims"),
            remedy=f"Write as many as the state has: {_shown(state.dims)}",
        )
    elif any(dim < 0 for dim in initial.dims):
        yield Mistake(
            message=f"'initial_state' field for state input name '{name}' contains variable dimensions.",
            path=(*path, "dims"),
            remedy="Write how large it is at first, in place of -1.",
        )
    elif any(expected not in (-1, dim) for dim, expected in zip(initial.dims, state.dims, strict=True)):
        yield Mistake(
            message=f"'initial_state' field for state input '{name}' has other dimensions than the state.",
            path=(*path, "dims"),
            remedy=f"Write those of the state: {_shown(state.dims)}",
        )
    if initial.zero_data is None and not initial.data_file:
        yield Mistake(
            message=f"initial_state setting expects state'{name}' to have state_data set",
            path=path,
            remedy=f'Write zero_data: true, or data_file: "…" with the name of a file in {FOLDER}/.',
        )


def _shown(dims: tuple[int, ...]) -> str:
    sizes = ", ".join("a size" if dim == -1 else str(dim) for dim in dims)
    return f"dims: [ {sizes} ]"
