"""What ``nerite client`` prints: outputs, and what happens in an interval."""

from __future__ import annotations

import json

import numpy as np

from nerite.client import ModelDescription, ModelStatistics, TensorDescription
from nerite.tools.client import between, frame, lines
from nerite.tools.client_infer import as_json, as_table

MODEL = ModelDescription("m", (), "", (), (TensorDescription("half", "BF16", (1,)),))
OUTPUTS = {
    "numbers": np.array([[1, 2]], np.int32),
    "said": np.array([b"two\nlines"], object),
    "words": np.array([[b"one", b"\xff"]], object),
    "half": np.array([1.5], np.float32),
    "many": np.arange(1000, dtype=np.int64),
}


def test_outputs_for_people() -> None:
    assert as_table(MODEL, OUTPUTS, 200).splitlines() == [
        "+---------+----------+--------+-------------------------------------+",
        "| Output  | Datatype | Shape  | Values                              |",
        "+---------+----------+--------+-------------------------------------+",
        "| numbers | INT32    | [1, 2] | [[1, 2]]                            |",
        "| said    | BYTES    | [1]    | two                                 |",
        "|         |          |        | lines                               |",
        "| words   | BYTES    | [1, 2] | [['one', '\\\\xff']]                  |",
        "| half    | BF16     | [1]    | [1.5]                               |",
        "| many    | INT64    | [1000] | [  0,   1,   2, ..., 997, 998, 999] |",
        "+---------+----------+--------+-------------------------------------+",
    ]


def test_outputs_for_machines() -> None:
    document = json.loads(json.dumps(as_json(MODEL, OUTPUTS)))
    assert document["numbers"] == {"datatype": "INT32", "shape": [1, 2], "data": [[1, 2]]}
    assert document["words"]["data"] == [["one", {"base64": "/w=="}]]
    assert document["half"]["datatype"] == "BF16"
    assert len(document["many"]["data"]) == 1000


def statistics(name: str, requests: int, failures: int = 0) -> ModelStatistics:
    times = {"count": requests, "ns": requests * 2_000_000}
    told = {"success": times, "queue": times, "compute_infer": times, "fail": {"count": failures, "ns": 0}}
    counts = {"inference_count": requests * 4, "execution_count": requests}
    return ModelStatistics.read({"name": name, "version": "1", "inference_stats": told, **counts})


def test_an_interval_in_lines() -> None:
    before = [statistics("busy", 10), statistics("idle", 5)]
    after = [statistics("busy", 30, 2), statistics("idle", 5), statistics("new", 1)]
    happened = between(before, after)
    assert lines(happened, 2.0, "12:00:00").splitlines() == [
        "12:00:00 busy 1: 11.0 requests/s, 1.0 failures/s, queue 2.000 ms, compute 2.000 ms, batch 4.0",
        "12:00:00 new 1: 0.5 requests/s, 0.0 failures/s, queue 2.000 ms, compute 2.000 ms, batch 4.0",
    ]
    assert lines(between(before, before), 1.0, "12:00:00") == "12:00:00 no requests"


def test_an_interval_as_a_table() -> None:
    table = frame(between([statistics("busy", 10)], [statistics("busy", 30)]), 2.0, 200).splitlines()
    assert table[1:4:2] == [
        "| Model | Version | Requests/s | Failures/s | Queue ms | Compute ms | Mean batch |",
        "| busy  | 1       | 10.0       | 0.0        | 2.000    | 2.000      | 4.0        |",
    ]
