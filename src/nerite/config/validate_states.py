"""What has to hold for the controls and states of a sequence model, taken together with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nerite.config.initial_states import FOLDER
from nerite.config.mistake import FieldPath, Mistake
from nerite.config.model_config import ModelConfig
from nerite.config.scheduling_choice import SequenceInitialState, SequenceState

_SEQUENCE: Final = "sequence_batching"


def check_states(config: ModelConfig) -> Iterator[Mistake]:
    """Find what is wrong with the tensors that the server makes for a sequence model, and with those that it keeps."""
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
    """Find a name that is another tensor's already; take note of it."""
    if name and name in taken:
        yield Mistake(
            message=f"sequence batching {what} is {taken[name]}, too, for {model}",
            path=path,
            remedy="Callers do not send what the server makes: remove one of the two, or write another name.",
        )
    taken.setdefault(name, kind)


def _check_state(state: SequenceState, path: FieldPath, model: str) -> Iterator[Mistake]:
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


def _check_initial(state: SequenceState, path: FieldPath) -> Iterator[Mistake]:
    """Find what is wrong with how a state begins, in Triton's words; the content of a file is not looked at."""
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


def _check_value(state: SequenceState, initial: SequenceInitialState, path: FieldPath) -> Iterator[Mistake]:
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
