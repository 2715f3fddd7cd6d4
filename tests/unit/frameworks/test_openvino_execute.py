"""Executing with OpenVINO: results, batches, types, shapes, and whose memory it all is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openvino_models import (
    EXACT,
    Opened,
    add_sub,
    counting,
    declared,
    identity,
    mapped,
    model,
    network,
    ops,
    ov,
    parameter,
    parameters,
    save,
    scaled,
)

from nerite.backends.interface import ExecutionTimes, InstanceContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal
from nerite.frameworks.openvino.graph import DATATYPES
from opened import bare, decoded, header, request

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4) - 3


def test_results_are_those_of_openvino(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).random((4, 3, 8, 8), dtype=np.float32)
    compiled = ov.Core().compile_model(network(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    opened = Opened(tmp_path, network())
    assert np.array_equal(opened.answer(IN=rows)["OUT"], compiled(rows)[0])
    parts = opened.execute(*(request(IN=rows[at : at + 1]) for at in range(4)))
    joined = np.concatenate([decoded(part)["OUT"] for part in parts])
    np.testing.assert_allclose(joined, compiled(rows)[0], rtol=1e-5)


def test_a_batch_of_requests_that_differ(tmp_path: Path) -> None:
    opened = Opened(tmp_path, add_sub(), {"max_batch_size": 8})
    both, one, turned = opened.execute(
        request(A=ROWS, B=ROWS), request(["SUM"], A=ROWS[:1], B=ROWS[1:]), request(["DIFFERENCE"], B=ROWS, A=ROWS * 3)
    )
    assert sorted(decoded(both)) == ["DIFFERENCE", "SUM"]
    assert np.array_equal(decoded(both)["SUM"], ROWS * 2)
    assert np.array_equal(decoded(one)["SUM"], ROWS[:1] + ROWS[1:])
    assert list(decoded(turned)) == ["DIFFERENCE"]
    assert np.array_equal(decoded(turned)["DIFFERENCE"], ROWS * 2)


@pytest.mark.parametrize("element", [name for name in DATATYPES if name != "string"])
def test_each_type_arrives_and_leaves(tmp_path: Path, element: str) -> None:
    datatype = DATATYPES[element]
    made = identity(element=getattr(ov.Type, element))
    opened = Opened(tmp_path, made, declared(datatype.config_name))
    bfloat16 = datatype is dtypes.BF16
    sent = np.array([[0, 16256 if bfloat16 else 1] * 2]).astype(datatype.numpy)
    found = decoded(opened.execute(request(bfloat16=bfloat16, IN=sent))[0])
    assert found["OUT"].dtype == datatype.numpy
    assert np.array_equal(found["OUT"], sent)


def test_strings(tmp_path: Path) -> None:
    opened = Opened(tmp_path, identity(element=ov.Type.string), declared("TYPE_STRING"))
    first = np.array([[b"", b"a\0b", "zoë".encode(), b"\xff\xfe"]], object)
    second = np.array([[b"x" * 100, b"", b"", b""]] * 2, object)
    answers = opened.execute(request(IN=first), request(IN=second))
    assert [decoded(answer)["OUT"].tolist() for answer in answers] == [first.tolist(), second.tolist()]


def test_no_rows(tmp_path: Path) -> None:
    opened = Opened(tmp_path, mapped(), declared("TYPE_FP32", (-1, 4), 0))
    assert opened.answer(IN=np.empty((0, 4), np.float32))["OUT"].shape == (0, 4)
    text = Opened(tmp_path / "text", identity(element=ov.Type.string), declared("TYPE_STRING", (-1, 4), 0))
    assert text.answer(IN=np.empty((0, 4), object))["OUT"].shape == (0, 4)


def test_a_scalar(tmp_path: Path) -> None:
    opened = Opened(tmp_path, mapped(dims=()))
    assert opened.config["input"][0]["dims"] == [1]
    assert opened.answer(IN=np.float32([-2]))["OUT"].tolist() == [0]


def test_dimensions_that_are_free(tmp_path: Path) -> None:
    opened = Opened(tmp_path, mapped(dims=(-1, -1, 3)))
    for shape in ((1, 5, 3), (4, 1, 3), (2, 7, 3), (1, 5, 3)):
        sent = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        assert np.array_equal(opened.answer(IN=sent)["OUT"], np.maximum(sent, 0))


def test_reshape_of_the_configuration(tmp_path: Path) -> None:
    config = {
        "max_batch_size": 4,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [2, 2], "reshape": {"shape": [4]}}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1, 4], "reshape": {"shape": [4]}}],
    }
    opened = Opened(tmp_path, mapped(), config)
    assert opened.answer(IN=ROWS.reshape(2, 2, 2))["OUT"].tolist() == np.maximum(ROWS, 0).reshape(2, 1, 4).tolist()


def test_declared_types_are_converted(tmp_path: Path) -> None:
    config = {
        "max_batch_size": 4,
        "input": [{"name": "IN", "data_type": "TYPE_UINT8", "dims": [4]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT64", "dims": [4]}],
    }
    found = Opened(tmp_path, scaled(3.0), config).answer(IN=np.array([[0, 1, 100, 255]], np.uint8))["OUT"]
    assert found.dtype == np.int64
    assert found.tolist() == [[0, 3, 300, 765]]


def test_an_answer_stays_as_it_was(tmp_path: Path) -> None:
    """The memory that OpenVINO computes in is used again."""
    opened = Opened(tmp_path, mapped(dims=(-1, 100_000)))
    ones = np.ones((1, 100_000), np.float32)
    (first,) = opened.execute(request(IN=ones))
    (second,) = opened.execute(request(IN=ones * 2))
    assert decoded(first)["OUT"].max() == 1
    assert decoded(second)["OUT"].min() == 2


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (ops.relu, [-1, 4]),
        (lambda node: ops.relu(ops.reshape(node, ops.constant([-1]), special_zero=False)), [-1]),
        (lambda node: ops.add(ops.relu(node), node), [-1, 4]),
        (lambda node: ops.concat([ops.relu(node), node], 1), [-1, 8]),
        (lambda node: ops.split(ops.tanh(node), ops.constant(1), 2).output(0), [-1, 2]),
    ],
)
def test_inputs_are_read_where_they_lie_and_not_written(tmp_path: Path, function: Any, dims: list[int]) -> None:
    """Bytes are constants to Python: an operator that computes in place must not do so there."""
    config = declared("TYPE_FP32", (-1, 4), 0)
    config["output"][0]["dims"] = dims
    opened = Opened(tmp_path, mapped(function), config)
    sent = -np.ones((64, 4), np.float32)
    data = sent.tobytes()
    asked = bare(header([("IN", dtypes.FP32, (64, 4))]), [data])
    for _ in range(3):
        assert opened.execute(asked)[0].error is None
    assert data == sent.tobytes()


def test_data_that_lies_askew(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled())
    data = memoryview(b"\0" + ROWS.tobytes())[1:]
    (answer,) = opened.execute(bare(header([("IN", dtypes.FP32, (2, 4))]), [data]))
    assert np.array_equal(decoded(answer)["OUT"], ROWS * 2)


def test_batches_are_filled_up(tmp_path: Path) -> None:
    config = {**declared("TYPE_FP32"), **parameters(ENABLE_BATCH_PADDING="YES")}
    opened = Opened(tmp_path, mapped(), config)
    for rows in (1, 3, 4):
        sent = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) - 5
        assert np.array_equal(opened.answer(IN=sent)["OUT"], np.maximum(sent, 0))
    halves = opened.execute(request(IN=ROWS[:1]), request(IN=ROWS[1:]))
    assert np.array_equal(np.concatenate([decoded(half)["OUT"] for half in halves]), np.maximum(ROWS, 0))


def test_a_model_that_is_filled_up_sees_one_batch_size(tmp_path: Path) -> None:
    given = parameter("IN")
    rows = ops.gather(ops.shape_of(given), ops.constant([0]), ops.constant(0))
    seen = ops.multiply(ops.add(ops.multiply(given, ops.constant(np.float32(0))), ops.convert(rows, "f32")), given)
    config = declared("TYPE_FP32")
    sent = np.ones((1, 4), np.float32)
    assert Opened(tmp_path, model([given], OUT=seen), config).answer(IN=sent)["OUT"].max() == 1
    padded = Opened(tmp_path, None, {**config, **parameters(ENABLE_BATCH_PADDING="YES")})
    assert padded.answer(IN=sent)["OUT"].min() == 4


def test_a_state_of_the_model_ends_with_the_request(tmp_path: Path) -> None:
    opened = Opened(tmp_path, counting())
    assert [opened.answer(IN=np.float32([[5]]))["OUT"].tolist() for _ in range(3)] == [[[5]]] * 3


def test_instances_compute_side_by_side(tmp_path: Path) -> None:
    opened = Opened(tmp_path, network())
    instances = [opened.model.instance(InstanceContext(f"m_{number}", sharing=3)) for number in range(3)]
    rows = np.random.default_rng(1).random((3, 2, 3, 8, 8), dtype=np.float32)
    wanted = [opened.answer(IN=each)["OUT"] for each in rows]
    wrong = []

    def work(number: int) -> None:
        for _ in range(50):
            (answer,) = instances[number].execute([request(IN=rows[number])], ExecutionTimes())
            if not np.array_equal(decoded(answer)["OUT"], wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_goes_wrong_is_said_without_places_in_the_source(tmp_path: Path) -> None:
    a, b = parameter("A", (-1, -1)), parameter("B", (-1, -1))
    save(tmp_path, model([a, b], SUM=ops.add(a, b)))
    opened = Opened(tmp_path, None, {"parameters": EXACT})
    with pytest.raises(Internal) as refused:
        opened.answer(A=np.ones((1, 2), np.float32), B=np.ones((1, 3), np.float32))
    said = refused.value.message
    assert said.startswith("openvino error in running inference : ")
    assert ".cpp" not in said and "\n" not in said
    # And the next request is answered.
    assert opened.answer(A=np.ones((1, 2), np.float32), B=np.ones((1, 2), np.float32))["SUM"].tolist() == [[2, 2]]
