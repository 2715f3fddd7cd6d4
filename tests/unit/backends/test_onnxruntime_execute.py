"""Executing ONNX models: rows in, the same rows out, whatever shared the batch."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from nerite.backends.arrays import batches, calls
from nerite.backends.arrays.calls import OutputSelections
from nerite.backends.configuration import TensorPort
from nerite.backends.interface import ExecutionTimes, InstanceContext
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.errors import Internal
from onnx_models import Opened, add_sub, constant, identity, model, node, scaled, tensor
from opened import bare, decoded, header, request


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + count * 4, dtype=np.float32).reshape(count, 4)


def test_one_request(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled(2.0))
    [response] = opened.execute(request(IN=rows(3)))
    assert response.header is not None
    assert (response.header.model_name, response.header.model_version) == ("m", "1")
    np.testing.assert_array_equal(decoded(response)["OUT"], rows(3) * 2)


def test_one_request_is_not_copied(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled())
    seen = []
    run = opened.instance.compute
    opened.instance.compute = lambda selection, arrays: (seen.append(dict(arrays)), run(selection, arrays))[1]
    data = rows(2).tobytes()
    opened.execute(bare(header([("IN", dtypes.FP32, (2, 4))]), [data]))
    assert np.shares_memory(seen[0]["IN"], np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("sizes", [[1, 2, 1], [1, 1, 1]])
def test_a_batch_runs_once_and_its_responses_are_views_of_one_array(tmp_path: Path, sizes: list[int]) -> None:
    opened = Opened(tmp_path, scaled(2.0, dims=["N", 4000]))
    runs = []
    run = opened.instance.compute
    opened.instance.compute = lambda selection, arrays: runs.append(run(selection, arrays)) or runs[-1]
    parts = [np.full((size, 4000), number, np.float32) for number, size in enumerate(sizes)]
    responses = opened.execute(*[request(IN=part) for part in parts])
    for part, response in zip(parts, responses, strict=True):
        np.testing.assert_array_equal(decoded(response)["OUT"], part * 2)
        assert np.shares_memory(np.frombuffer(response.data[0], np.uint8), runs[0][0])
    assert len(runs) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_small_responses_do_not_keep_the_batch(tmp_path: Path, count: int) -> None:
    opened = Opened(tmp_path, scaled(2.0))
    for response in opened.execute(*[request(IN=rows(1))] * count):
        assert isinstance(response.data[0], bytes)
        assert decoded(response)["OUT"].tolist() == [[0, 2, 4, 6]]


@pytest.mark.parametrize("small", [0, batches.SMALL])
def test_responses_outlive_the_next_batch_and_the_model(
    tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "SMALL", small)
    opened = Opened(tmp_path, identity())
    responses = opened.execute(request(IN=rows(1)), request(IN=rows(1, 50)))
    opened.execute(request(IN=rows(1, 7)), request(IN=rows(1, 8)))
    opened.close()
    del opened
    np.testing.assert_array_equal(decoded(responses[0])["OUT"], rows(1))
    np.testing.assert_array_equal(decoded(responses[1])["OUT"], rows(1, 50))


PASSING_THROUGH = {
    "identity": [node("Identity", ["IN"], ["OUT"])],
    "reshape": [node("Reshape", ["IN", "shape"], ["OUT"])],
    "flatten": [node("Flatten", ["IN"], ["OUT"])],
    "there and back": [node("Unsqueeze", ["IN", "axis"], ["up"]), node("Squeeze", ["up", "axis"], ["OUT"])],
}


@pytest.mark.parametrize("nodes", PASSING_THROUGH.values(), ids=PASSING_THROUGH)
def test_an_output_that_is_an_input_never_shares_its_memory(
    tmp_path: Path, nodes: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the buffer that is used again, a shared output would change under the client's feet.
    monkeypatch.setattr(batches, "LARGE", 1)
    monkeypatch.setattr(batches, "SMALL", 0)
    constants = [constant("shape", np.array([0, 4])), constant("axis", np.array([0]))]
    opened = Opened(tmp_path, model(nodes, [tensor("IN", ["N", 4])], [tensor("OUT", ["N", 4])], constants))
    responses = opened.execute(request(IN=rows(1)), request(IN=rows(1, 50)))
    opened.execute(request(IN=rows(1, 7)), request(IN=rows(1, 8)))
    np.testing.assert_array_equal(decoded(responses[0])["OUT"], rows(1))
    np.testing.assert_array_equal(decoded(responses[1])["OUT"], rows(1, 50))


def test_an_input_that_is_also_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LARGE", 1)
    monkeypatch.setattr(batches, "SMALL", 0)
    proto = model(
        [node("Neg", ["IN"], ["OUT"])], [tensor("IN", ["N", 4])], [tensor("IN", ["N", 4]), tensor("OUT", ["N", 4])]
    )
    opened = Opened(tmp_path, proto)
    responses = opened.execute(request(IN=rows(1)), request(IN=rows(1, 50)))
    opened.execute(request(IN=rows(1, 7)), request(IN=rows(1, 8)))
    np.testing.assert_array_equal(decoded(responses[1])["IN"], rows(1, 50))
    np.testing.assert_array_equal(decoded(responses[1])["OUT"], -rows(1, 50))


def test_large_batches_use_the_instances_own_buffer_and_grow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LARGE", 64)
    opened = Opened(tmp_path, scaled(3.0), {"max_batch_size": 64})
    for count in (1, 2, 5, 3):
        parts = [rows(count), rows(count, 10), rows(count, 20)]
        for part, response in zip(parts, opened.execute(*[request(IN=part) for part in parts]), strict=True):
            np.testing.assert_array_equal(decoded(response)["OUT"], part * 3)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(
        st.tuples(
            st.integers(1, 3),
            st.lists(st.sampled_from(["SUM", "DIFFERENCE"]), unique=True),
            st.booleans(),
            st.integers(-1000, 1000),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_request_gets_its_rows_and_its_outputs(add_sub_model: Opened, batch: list) -> None:
    requests, expected = [], []
    for count, outputs, swapped, start in batch:
        a, b = rows(count, start), rows(count, 3 - start)
        inputs = {"B": b, "A": a} if swapped else {"A": a, "B": b}
        requests.append(request(outputs, **inputs))
        both = {"DIFFERENCE": a - b, "SUM": a + b}
        expected.append({name: value for name, value in both.items() if not outputs or name in outputs})
    for response, want in zip(add_sub_model.execute(*requests), expected, strict=True):
        got = decoded(response)
        assert list(got) == sorted(want)
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value)


@pytest.fixture(scope="module")
def add_sub_model(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(tmp_path_factory.mktemp("add_sub"), add_sub(), {"max_batch_size": 32})


def test_only_outputs_that_somebody_wants_are_computed(tmp_path: Path) -> None:
    opened = Opened(tmp_path, add_sub())
    asked = []
    run = opened.instance.compute
    opened.instance.compute = lambda selection, arrays: asked.append(list(selection.names)) or run(selection, arrays)
    both = {"A": rows(1), "B": rows(1)}
    opened.execute(request(["SUM"], **both), request(["SUM"], **both))
    opened.execute(request(["SUM"], **both), request(["DIFFERENCE"], **both))
    opened.execute(request(["SUM"], **both), request(**both))
    assert asked == [["SUM"], ["DIFFERENCE", "SUM"], ["DIFFERENCE", "SUM"]]


def test_response_headers_are_the_same_object_for_the_same_shape(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled())
    alone = opened.execute(request(IN=rows(1)))[0].header
    batch = opened.execute(request(IN=rows(1)), request(IN=rows(2)), request(IN=rows(1)))
    assert batch[0].header is batch[2].header is alone
    assert batch[1].header is not alone


def test_headers_that_never_repeat_are_kept_as_far_as_the_budgets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = {name: ByteBudget(name, 128 * 1024) for name in ("CALLS", "RESPONSE_HEADERS")}
    for name, budget in budgets.items():
        monkeypatch.setattr(calls, name, budget)
    opened = Opened(tmp_path, scaled(dims=["N", "M"]))
    for size in range(1, 600):
        opened.execute(request(IN=np.zeros((1, size), np.float32)))
        assert all(budget.used <= budget.limit for budget in budgets.values())
    assert 400 < budgets["CALLS"].evictions < 599


def test_subsets_of_outputs_are_kept_as_far_as_the_budget_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 128 * 1024)
    monkeypatch.setattr(calls, "CALLS", budget)
    ports = [TensorPort(f"O{number}", dtypes.FP32, (1,), (1,), batching=False) for number in range(9)]
    selections = OutputSelections("model", "1", ports)
    for chosen in range(1, 512):
        wanted = frozenset(port.name for place, port in enumerate(ports) if chosen >> place & 1)
        assert selections.of(wanted).names == sorted(wanted)
        assert budget.used <= budget.limit
    assert 411 < budget.evictions < 511


NUMERIC = [
    (TensorProto.BOOL, np.bool_), (TensorProto.UINT8, np.uint8), (TensorProto.UINT16, np.uint16),
    (TensorProto.UINT32, np.uint32), (TensorProto.UINT64, np.uint64), (TensorProto.INT8, np.int8),
    (TensorProto.INT16, np.int16), (TensorProto.INT32, np.int32), (TensorProto.INT64, np.int64),
    (TensorProto.FLOAT16, np.float16), (TensorProto.FLOAT, np.float32), (TensorProto.DOUBLE, np.float64),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "numpy_type"), NUMERIC, ids=[t.__name__ for _, t in NUMERIC])
def test_every_numeric_type_both_ways(tmp_path: Path, kind: int, numpy_type: type) -> None:
    opened = Opened(tmp_path, identity(["N", 3], kind))
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(numpy_type)
    responses = opened.execute(request(IN=values[:1]), request(IN=values[1:]))
    for row, response in enumerate(responses):
        got = decoded(response)["OUT"]
        assert got.dtype == numpy_type
        np.testing.assert_array_equal(got, values[row : row + 1])


@pytest.mark.parametrize("from_bfloat16", [True, False])
def test_bfloat16_in_and_out(tmp_path: Path, from_bfloat16: bool) -> None:
    bfloat16, float32 = tensor("IN", ["N", 2], TensorProto.BFLOAT16), tensor("OUT", ["N", 2])
    nodes = [node("Cast", ["IN"], ["OUT"], to=TensorProto.FLOAT)]
    if not from_bfloat16:
        bfloat16, float32 = tensor("OUT", ["N", 2], TensorProto.BFLOAT16), tensor("IN", ["N", 2])
        nodes = [node("Cast", ["IN"], ["OUT"], to=TensorProto.BFLOAT16)]
    words, numbers = np.array([[0x3F80, 0x4000]], np.uint16), np.array([[1, 2]], np.float32)
    inputs, outputs = ([bfloat16], [float32]) if from_bfloat16 else ([float32], [bfloat16])
    opened = Opened(tmp_path, model(nodes, inputs, outputs))
    given_, wanted = (words, numbers) if from_bfloat16 else (numbers, words)
    responses = opened.execute(request(bfloat16=True, IN=given_), request(bfloat16=True, IN=given_))
    for response in responses:
        np.testing.assert_array_equal(decoded(response)["OUT"], wanted)
    assert responses[0].header is not None
    assert responses[0].header.outputs[0].datatype is (dtypes.FP32 if from_bfloat16 else dtypes.BF16)


def test_strings_both_ways(tmp_path: Path) -> None:
    opened = Opened(tmp_path, identity(["N", 2], TensorProto.STRING))
    parts = [[["", "plain"]], [["Zürich", "with\0zero"], ["日本", "x" * 300]]]
    for part, response in zip(parts, opened.execute(*[request(IN=np.array(p, object)) for p in parts]), strict=True):
        assert decoded(response)["OUT"].tolist() == [[text.encode() for text in row] for row in part]


def test_no_strings_at_all(tmp_path: Path) -> None:
    opened = Opened(tmp_path, identity(["N", "M"], TensorProto.STRING))
    assert opened.answer(IN=np.empty((1, 0), object))["OUT"].shape == (1, 0)


def test_bytes_that_are_not_text_reach_the_model(tmp_path: Path) -> None:
    raw = np.array([[b"\xff\xfe", b"abc"]], object)
    # A string cannot come out again if it is not text, so the model compares.
    proto = model(
        [node("Equal", ["A", "B"], ["OUT"])],
        [tensor("A", ["N", 2], TensorProto.STRING), tensor("B", ["N", 2], TensorProto.STRING)],
        [tensor("OUT", ["N", 2], TensorProto.BOOL)],
        opset=19,
    )
    opened = Opened(tmp_path, proto)
    other = np.array([[b"\xff\xfe", b"\xff"]], object)
    assert opened.answer(A=raw, B=other)["OUT"].tolist() == [[True, False]]


def test_strings_that_are_not_text_cannot_come_out(tmp_path: Path) -> None:
    opened = Opened(tmp_path, identity(["N", 1], TensorProto.STRING))
    with pytest.raises(Internal, match="onnx runtime error: 'utf-8' codec can't decode"):
        opened.execute(request(IN=np.array([[b"\xff"]], object)))


def test_empty_arrays(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled(dims=["N", "M"]))
    assert opened.answer(IN=np.empty((2, 0), np.float32))["OUT"].shape == (2, 0)
    responses = opened.execute(*[request(IN=np.empty((1, 0), np.float32))] * 2)
    assert [decoded(response)["OUT"].shape for response in responses] == [(1, 0), (1, 0)]


def test_a_scalar_model_takes_and_gives_one_element(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled(3.0, dims=[]))
    assert not opened.config["max_batch_size"]
    assert opened.answer(IN=np.array([2.0], np.float32))["OUT"].tolist() == [6.0]


def test_rows_without_dimensions_are_reshaped(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled(3.0, dims=["N"]))
    assert opened.config["input"] == [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}]
    first, second = opened.execute(
        request(IN=np.array([[1.0], [2.0]], np.float32)), request(IN=np.array([[5.0]], np.float32))
    )
    assert decoded(first)["OUT"].tolist() == [[3.0], [6.0]]
    assert decoded(second)["OUT"].tolist() == [[15.0]]


def test_reshape_with_a_free_size(tmp_path: Path) -> None:
    reshaped = {"data_type": "TYPE_FP32", "dims": [-1, 1, 2], "reshape": {"shape": [1, -1, 2]}}
    config = {
        "max_batch_size": 4,
        "input": [{"name": "IN", **reshaped}],
        "output": [{"name": "OUT", **reshaped}],
    }
    opened = Opened(tmp_path, scaled(2.0, dims=["N", 1, "M", 2]), config)
    value = np.arange(6, dtype=np.float32).reshape(1, 3, 1, 2)
    np.testing.assert_array_equal(opened.answer(IN=value)["OUT"], value * 2)


def test_a_model_without_batches_runs_request_after_request(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled(2.0, dims=[4]))
    assert not opened.config["max_batch_size"]
    responses = opened.execute(request(IN=rows(1)[0]), request(IN=rows(1, 50)[0]))
    assert [decoded(response)["OUT"].tolist() for response in responses] == [[0, 2, 4, 6], [100, 102, 104, 106]]


def test_an_optional_input_has_the_models_default(tmp_path: Path) -> None:
    proto = model(
        [node("Mul", ["IN", "FACTOR"], ["OUT"])],
        [tensor("IN", [4]), tensor("FACTOR", [1])],
        [tensor("OUT", [4])],
        [constant("FACTOR", np.array([10.0], np.float32))],
    )
    config = {
        "input": [
            {"name": "IN", "data_type": "TYPE_FP32", "dims": [4]},
            {"name": "FACTOR", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
        ]
    }
    opened = Opened(tmp_path, proto, config)
    assert opened.answer(IN=rows(1)[0])["OUT"].tolist() == [0, 10, 20, 30]
    assert opened.answer(IN=rows(1)[0], FACTOR=np.array([2.0], np.float32))["OUT"].tolist() == [0, 2, 4, 6]


def test_what_onnx_runtime_refuses_is_an_internal_error_in_tritons_words(tmp_path: Path) -> None:
    proto = model(
        [node("Gather", ["table", "IN"], ["OUT"])],
        [tensor("IN", ["N", 1], TensorProto.INT64)],
        [tensor("OUT", ["N", 1])],
        [constant("table", np.array([1, 2, 3], np.float32))],
    )
    opened = Opened(tmp_path, proto)
    assert opened.answer(IN=np.array([[2]]))["OUT"].tolist() == [[3.0]]
    with pytest.raises(Internal, match=r"^onnx runtime error \d+: .*indices element out of data bounds"):
        opened.execute(request(IN=np.array([[7]])))


def test_rows_that_went_missing_are_an_error(tmp_path: Path) -> None:
    proto = model(
        [node("Unique", ["IN"], ["OUT"], axis=0, sorted=0)], [tensor("IN", ["N", 4])], [tensor("OUT", ["K", 4])]
    )
    opened = Opened(tmp_path, proto)
    with pytest.raises(Internal, match=r"output 'OUT' has shape \[1, 4\] for a batch of 2"):
        opened.execute(request(IN=rows(1)), request(IN=rows(1)))


def test_timings_tell_the_phases_apart(tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled())
    timings = ExecutionTimes()
    started = timings.started_ns
    opened.instance.execute([request(IN=rows(1))], timings)
    assert started < timings.inputs_ready_ns < timings.computed_ns


def test_instances_share_a_session_on_a_cpu_and_need_not(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "shared", scaled())
    opened.model.instance(InstanceContext("m_1"))
    assert len(opened.model.shared_copies) == 1
    config = {"parameters": {"share_session_between_instances": {"string_value": "false"}}}
    alone = Opened(tmp_path / "alone", scaled(), config)
    second = alone.model.instance(InstanceContext("m_1"))
    assert len(alone.model.shared_copies) == 0
    [response] = second.execute([request(IN=rows(1))], ExecutionTimes())
    assert decoded(response)["OUT"].tolist() == [[0, 2, 4, 6]]


def test_instances_that_share_a_session_do_not_mix_up_their_rows(tmp_path: Path) -> None:
    opened = Opened(tmp_path, add_sub(), {"max_batch_size": 32})
    instances = [opened.model.instance(InstanceContext(f"m_{number}")) for number in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(100):
                parts = [(rows(1 + turn % 3, 1000 * number + turn), rows(1 + turn % 3, index)) for index in range(3)]
                responses = instances[number].execute([request(A=a, B=b) for a, b in parts], ExecutionTimes())
                for (a, b), response in zip(parts, responses, strict=True):
                    np.testing.assert_array_equal(decoded(response)["SUM"], a + b)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
