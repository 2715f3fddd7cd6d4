"""Whether a configuration says of a model what its program says of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nerite.backends.arrays.agreement import check_datatype, check_dims, check_optional, scattered_outputs
from nerite.backends.arrays.graph import GraphTensor
from nerite.backends.configuration import model_dims
from nerite.backends.pytorch.program import Program, Slot
from nerite.backends.sequence_tensors import control_inputs, state_inputs, state_outputs
from nerite.core.errors import Internal, InvalidArgument


def check(
    name: str,
    config: Mapping[str, Any],
    program: Program,
    inputs: Mapping[str, Slot],
    outputs: Mapping[str, Slot],
) -> None:
    """Raise for the first thing in which ``config`` and the program disagree.

    ``inputs`` and ``outputs`` are by the configuration's names; empty where the program says nothing of them.
    """
    max_batch_size = int(config.get("max_batch_size", 0))
    if program.highest_batch is not None and max_batch_size > program.highest_batch:
        raise InvalidArgument(
            f"unable to load model '{name}', max_batch_size is {max_batch_size}, and the program was exported for "
            f"batches of up to {program.highest_batch}. Set max_batch_size: {program.highest_batch}, or export it with "
            "a larger maximum"
        )
    for entry in config.get("input", ()):
        check_optional(name, entry, max_batch_size)
        _check_entry(name, entry, inputs.get(entry["name"]), "input", max_batch_size)
    for entry in control_inputs(config):
        if (slot := inputs.get(entry["name"])) and (tensor := slot.as_tensor(entry["name"])):
            check_datatype(name, entry, tensor, "sequence control")
    for entry in state_inputs(config):
        _check_entry(name, entry, inputs.get(entry["name"]), "input state", max_batch_size)
    scattered = scattered_outputs(config)
    for entry in config.get("output", ()):
        if entry["name"] not in scattered:
            _check_entry(name, entry, outputs.get(entry["name"]), "output", max_batch_size)
    for entry in state_outputs(config):
        _check_entry(name, entry, outputs.get(entry["name"]), "output state", max_batch_size)


def _check_entry(name: str, entry: Mapping[str, Any], slot: Slot | None, side: str, max_batch_size: int) -> None:
    if entry["data_type"] == "TYPE_STRING":
        _check_text(name, entry, slot, side, max_batch_size)
        return
    if slot is None:
        return
    if slot.text:
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects datatype {entry['data_type']} for {side} "
            f"'{entry['name']}', model provides a list of strings. Set data_type: TYPE_STRING"
        )
    tensor = slot.as_tensor(entry["name"])
    if tensor is not None:
        check_datatype(name, entry, tensor, side)
        if not entry.get("allow_ragged_batch"):
            exact = side == "output"
            check_dims(name, entry, _as_free(tensor, entry) if exact else tensor, max_batch_size, exact=exact)


def _as_free(tensor: GraphTensor, entry: Mapping[str, Any]) -> GraphTensor:
    """Return an output with those sizes free that the configuration leaves free: to say less of it does no harm."""
    declared = model_dims(entry)
    fixed = len(tensor.dims) - len(declared)
    loose = [-1 if want == -1 else have for have, want in zip(tensor.dims[fixed:], declared, strict=False)]
    return tensor._replace(dims=(*tensor.dims[:fixed], *loose)) if fixed in (0, 1) else tensor


def _check_text(name: str, entry: Mapping[str, Any], slot: Slot | None, side: str, max_batch_size: int) -> None:
    if slot is not None and slot.text is False:
        provided = slot.datatype.config_name if slot.datatype else "a tensor"
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects datatype TYPE_STRING for {side} '{entry['name']}', "
            f"model provides {provided}. Set data_type: {provided if slot.datatype else 'that of its elements'}"
        )
    dims = model_dims(entry)
    # [1] is what a configuration says for a scalar; a row of a batch is one string.
    if len(dims) + (max_batch_size > 0) > 1 and not (max_batch_size > 0 and dims == (1,)):
        raise Internal(
            f"Triton only supports 1 dimensional List of String as {side} for '{entry['name']}' for model '{name}'. "
            f"Set dims: {'[ 1 ], for one string in each row' if max_batch_size > 0 else '[ -1 ]'}"
        )
