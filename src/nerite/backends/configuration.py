"""What a configuration says of a model, as several backends read it. Pure, but for a look for files beside the model.

``config`` is in JSON form, and an entry is one of ``input`` or ``output``, or is made like one (``sequence_tensors``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from nerite.backends.interface import ModelContext
from nerite.backends.sequence_tensors import control_inputs, state_inputs, state_outputs

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
