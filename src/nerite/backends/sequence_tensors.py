"""What a sequence model takes and gives beside the inputs and outputs that its configuration declares for callers.

The server makes these inputs, and takes these outputs out of responses. To a backend they are tensors like any other:
what is returned here has the form of an entry of ``input`` or ``output``; that of a control has its ``kind``, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
