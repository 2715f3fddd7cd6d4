"""Models whose sequences run in turns, or begin with a state."""

from __future__ import annotations

from conformance.repositories import Files, python

_TURNS = """
sequence_batching {
  iterative_sequence: true
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 2.5 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""


def begins(state: str, *initial: str, name: str = "FILE", files: Files | None = None) -> Files:
    """Return a model with a state, described as in ``INT32 dims: [ 1 ]``, and initial states described likewise."""
    states = " ".join(
        f'initial_state {{ name: "{letter}" data_type: TYPE_{each} }}'
        for letter, each in zip("ab", initial, strict=False)
    )
    batching = f'state {{ input_name: "{name}" output_name: "{name}_AFTER" data_type: TYPE_{state} {states} }}'
    model = python("begins", "IN INT32 1", "SEEN STRING 1", f"sequence_batching {{ {batching} }}", batch=1)
    return {**model, **(files or {})}


NUMBERS = {"initial_state/numbers": b"\x07\0\0\0\xf8\xff\xff\xff"}

MODELS = {
    "begins": begins("INT32 dims: [ 1, 1 ]", 'INT32 dims: [ 1, 1 ] data_file: "numbers"', files=NUMBERS),
    "begins_text": begins(
        "STRING dims: [ 2 ]",
        'STRING dims: [ 2 ] data_file: "texts"',
        name="TEXT",
        files={"initial_state/texts": b"\x03\0\0\0one\0\0\0\0"},
    ),
    "nofile": begins("INT32 dims: [ 3 ]", 'INT32 dims: [ 3 ] data_file: "none"'),
    "otherdims": begins("INT32 dims: [ 1 ]", "INT32 dims: [ 1, 1 ] zero_data: true"),
    "shortfile": begins("INT32 dims: [ 3 ]", 'INT32 dims: [ 3 ] data_file: "numbers"', files=NUMBERS),
    "streamed": python(
        "streamed",
        "WORDS STRING 1",
        "SEEN STRING 1",
        _TURNS + "model_transaction_policy { decoupled: true }",
        batch=1,
    ),
    "turns": python("streamed", "WORDS STRING 1", "SEEN STRING 1", _TURNS, batch=1),
    "two": begins("INT32 dims: [ 1 ]", *["INT32 dims: [ 1 ] zero_data: true"] * 2),
}
