"""Traces of past requests: what is read from them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nerite.client import ClientError
from nerite.tools.bench.replay import TracedRequest, read_trace


def lines(*entries: object) -> str:
    return "\n".join(map(json.dumps, entries))


def read(folder: Path, text: str) -> tuple[TracedRequest, ...]:
    file = folder / "trace"
    file.write_text(text)
    return read_trace(file, "m")


def test_lines_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        lines(
            {"timestamp": 2500, "input_length": 600, "output_length": 9, "hash_ids": [7, 8]},
            {"timestamp": 500, "text_input": "Who is there?"},
            {"timestamp": 1000.5, "input_length": 3},
        ),
    )
    assert found == (
        TracedRequest(0.5, text="Who is there?"),
        TracedRequest(1.0005, 3),
        TracedRequest(2.5, 600, 9, (7, 8)),
    )


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "has no requests"),
        ("[", "is not JSON"),
        ("{", "line 1 is not JSON"),
        (lines(1), 'line 1: write {"timestamp"'),
        (lines({"timestamp": 1, "input_length": 1, "isl": 2}), "unknown field 'isl'. Remove it"),
        (lines({"input_length": 1}), "'timestamp' must be"),
        (lines({"timestamp": True, "input_length": 1}), "'timestamp' must be"),
        (lines({"timestamp": 1}), "either 'input_length' or 'text_input' is needed"),
        (lines({"timestamp": 1, "input_length": 1.5}), "'input_length' must be a number of tokens"),
        (lines({"timestamp": 1, "input_length": 1, "text_input": "x"}), "excludes 'input_length'"),
        (lines({"timestamp": 1, "input_length": 1, "text_input": 2}), "must be a string"),
        (lines({"timestamp": 1, "input_length": 600, "hash_ids": [1, 2, 3]}), "3 blocks of 512 tokens are more than"),
        (lines({"timestamp": 1, "input_length": 1, "hash_ids": ["a"]}), "must be a list of integers"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ClientError, match=said.replace("{", "\\{").replace("[", "\\[")):
        read(tmp_path, text)


def record(identity: int, model: str, *events: tuple[str, int], **more: Any) -> list[dict[str, Any]]:
    named = {"id": identity, "model_name": model, "model_version": 1, **more}
    return [named, {"id": identity, "timestamps": [{"name": name, "ns": ns} for name, ns in events]}]


def test_a_trace_of_the_server_has_times(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        json.dumps(
            [
                *record(1, "m", ("REQUEST_START", 5_000_000_000), ("HTTP_RECV_START", 4_000_000_000)),
                *record(2, "other", ("REQUEST_START", 1)),
                *record(3, "m", ("REQUEST_START", 3_000_000_000)),
                # A request that an ensemble made of another one comes by itself.
                *record(4, "m", ("REQUEST_START", 6_000_000_000), parent_id=2),
            ]
        ),
    )
    assert found == (TracedRequest(3.0), TracedRequest(4.0))


@pytest.mark.parametrize(
    "records, said",
    [
        (record(1, "other", ("REQUEST_START", 1)), "no requests to model 'm'. Models in it: other"),
        (record(1, "m"), "a request without a time"),
    ],
)
def test_a_trace_of_the_server_without_what_is_needed(tmp_path: Path, records: Any, said: str) -> None:
    with pytest.raises(ClientError, match=said):
        read(tmp_path, json.dumps(records))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ClientError, match="cannot read the trace /nowhere"):
        read_trace(Path("/nowhere"), "m")
