"""Batches of rows that differ in length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from configs import as_backends_get_it
from nerite.backends.arrays.batches import Ragged
from nerite.core.errors import Internal
from onnx_models import Opened, model, node, tensor
from opened import decoded, request

SHAPES = [(1, 3), (2, 4), (1, 0)]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("BATCH_ELEMENT_COUNT", [3, 8, 0]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [3, 11, 11]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 3, 11, 11]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 8),
        ("BATCH_ITEM_SHAPE", [[3], [4], [4], [0]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 4, 4, 0]),
    ],
)
@pytest.mark.parametrize("data_type", ["TYPE_INT32", "TYPE_FP32"])
def test_batch_inputs(kind: str, value: Any, data_type: str) -> None:
    entry = {"kind": kind, "target_name": ["T"], "source_input": ["S"], "data_type": data_type}
    found = Ragged(as_backends_get_it({"batch_input": [entry]})).made([{"S": shape} for shape in SHAPES])["T"]
    assert found.tolist() == value
    assert found.dtype == (np.int32 if data_type == "TYPE_INT32" else np.float32)


def test_batch_item_shapes_of_two_dimensions() -> None:
    entry = {"kind": "BATCH_ITEM_SHAPE", "target_name": ["T"], "source_input": ["S"], "data_type": "TYPE_INT32"}
    found = Ragged(as_backends_get_it({"batch_input": [entry]})).made([{"S": (2, 5, 6)}, {"S": (1, 7, 8)}])["T"]
    assert found.tolist() == [[5, 6], [5, 6], [7, 8]]


DOUBLED = model(
    [
        node("Add", ["IN", "IN"], ["OUT"]),
        # One number a request: where its part ends.
        node("Identity", ["ENDS"], ["END"]),
    ],
    [tensor("IN", ["T"]), tensor("ENDS", ["N"], TensorProto.INT32)],
    [tensor("OUT", ["T"]), tensor("END", ["N"], TensorProto.INT32)],
)
CONFIG = {
    "max_batch_size": 8,
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}],
    "output": [
        {"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "END", "data_type": "TYPE_INT32", "dims": [1], "reshape": {"shape": []}},
    ],
    "batch_input": [
        {
            "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT",
            "target_name": ["ENDS"],
            "source_input": ["IN"],
            "data_type": "TYPE_INT32",
        }
    ],
    "batch_output": [{"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["OUT"], "source_input": ["IN"]}],
}


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_rows_of_different_length_in_one_run(tmp_path: Path) -> None:
    opened = Opened(tmp_path, DOUBLED, CONFIG)
    runs = []
    run = opened.instance.compute
    opened.instance.compute = lambda selection, arrays: (runs.append(arrays), run(selection, arrays))[1]
    parts = [row(1, 2, 3), row(4), row(5, 6)]
    responses = opened.execute(*[request(IN=part) for part in parts])
    assert [decoded(response)["OUT"].tolist() for response in responses] == [[[2, 4, 6]], [[8]], [[10, 12]]]
    assert [decoded(response)["END"].tolist() for response in responses] == [[[3]], [[4]], [[6]]]
    assert [arrays["IN"].tolist() for arrays in runs] == [[1, 2, 3, 4, 5, 6]]


def test_one_row_alone(tmp_path: Path) -> None:
    opened = Opened(tmp_path, DOUBLED, CONFIG)
    assert opened.answer(IN=row(1, 2))["OUT"].tolist() == [[2, 4]]
    assert list(opened.answer(["END"], IN=row(1, 2))) == ["END"]


def test_one_batch_input_may_have_two_targets(tmp_path: Path) -> None:
    proto = model(
        [node("Add", ["IN", "IN"], ["OUT"]), node("Add", ["ENDS", "AGAIN"], ["END"])],
        [tensor("IN", ["T"]), tensor("ENDS", ["N"], TensorProto.INT32), tensor("AGAIN", ["N"], TensorProto.INT32)],
        [tensor("OUT", ["T"]), tensor("END", ["N"], TensorProto.INT32)],
    )
    [batch_input] = CONFIG["batch_input"]
    config = {**CONFIG, "batch_input": [{**batch_input, "target_name": ["ENDS", "AGAIN"]}]}
    assert Opened(tmp_path, proto, config).answer(IN=row(1, 2))["END"].tolist() == [[4]]


def test_a_flat_output_that_is_not_made_of_the_requests(tmp_path: Path) -> None:
    proto = model(
        [node("Concat", ["IN", "IN"], ["OUT"], axis=0), node("Identity", ["ENDS"], ["END"])],
        [tensor("IN", ["T"]), tensor("ENDS", ["N"], TensorProto.INT32)],
        [tensor("OUT", ["U"]), tensor("END", ["N"], TensorProto.INT32)],
    )
    opened = Opened(tmp_path, proto, CONFIG)
    with pytest.raises(Internal, match="output 'OUT' has 6 elements, the requests of the batch make 3"):
        opened.execute(request(IN=row(1, 2)), request(IN=row(3)))


def test_a_flat_output_with_more_dimensions_than_its_source(tmp_path: Path) -> None:
    config = {**CONFIG, "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1, -1]}, CONFIG["output"][1]]}
    opened = Opened(tmp_path, DOUBLED, config)
    with pytest.raises(Internal, match="output 'OUT' has more dimensions than the input whose shape it is to have"):
        opened.execute(request(IN=row(1, 2)))
