"""The same model behind each kind of sequence batcher."""

from __future__ import annotations

from conformance.repositories import Files, python


def sequence(*controls: str, candidates: int = 0, batch: int = 0, idle: int = 60_000_000) -> Files:
    """Return a model with these controls; ``candidates`` of the oldest strategy, or the direct one without any."""
    batching = f"max_sequence_idle_microseconds: {idle}"
    if candidates:
        batching += f" oldest {{ max_candidate_sequences: {candidates} }}"
    if controls:
        batching += f" control_input [ {', '.join(controls)} ]"
    more = f"instance_group [ {{ kind: KIND_CPU }} ]\nsequence_batching {{ {batching} }}"
    return python("sequence", "VALUE FP32 1; SECONDS FP32 1", "SAID STRING 1", more, batch)


def control(name: str, values: str) -> str:
    """Return a control input, with its values or its data type."""
    return f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{name} {values} }} ] }}'


MODELS = {
    "brief": sequence(idle=300_000),
    "direct": sequence(
        control("START", "int32_false_true: [ 0, 7 ]"),
        control("END", "fp32_false_true: [ -1.5, 2.5 ]"),
        control("READY", "bool_false_true: [ false, true ]"),
        control("CORRID", "data_type: TYPE_UINT64"),
        batch=4,
    ),
    "named": sequence(control("START", "int32_false_true: [ 0, 1 ]"), candidates=4),
    "oldest": sequence(
        control("START", "bool_false_true: [ true, false ]"),
        control("END", "int32_false_true: [ 0, 1 ]"),
        control("READY", "fp32_false_true: [ 0, 1 ]"),
        control("CORRID", "data_type: TYPE_INT32"),
        candidates=2,
        batch=4,
    ),
    "plain": sequence(),
    "texts": sequence(
        control("START", "int32_false_true: [ 0, 1 ]"), control("CORRID", "data_type: TYPE_STRING"), candidates=4
    ),
}
