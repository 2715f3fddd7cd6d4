"""ONNX models that take inputs and leave outputs in GPU memory: with the build for processors, and CUDA's stand-in."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from nerite.backends.arrays.device import DeviceArrayInstance
from nerite.backends.interface import ExecutionTimes, InstanceContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest
from nerite.core.tensor import DeviceBuffer
from nerite.devices import cuda
from onnx_models import Opened, add_sub, identity, model, node, scaled, tensor
from opened import bare, decoded, header, request

Opening = Callable[..., Opened]


@pytest.fixture
def on_gpu(cuda_frameworks: Any, tmp_path: Path) -> Iterator[Opening]:
    """Return what opens a model with an instance on a GPU."""
    models: list[Opened] = []

    def opening(proto: onnx.ModelProto, config: Mapping[str, Any] | None = None) -> Opened:
        models.append(Opened(tmp_path / str(len(models)), proto, config, kind="GPU"))
        return models[-1]

    yield opening
    for each in models:
        each.close()


def copied(before: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the number of copies since ``before``."""
    return {name: now[0] - before[name][0] for name, now in cuda.COPIES.totals().items() if now[0] > before[name][0]}


def keeping(given: InferenceRequest, *names: str) -> InferenceRequest:
    """Return a request that takes these outputs on the GPU."""
    return bare(given.header.with_device_outputs(frozenset(names)), given.data)  # type: ignore[arg-type]


def content(buffer: object, dtype: type[np.generic] = np.float32) -> list[Any]:
    assert isinstance(buffer, DeviceBuffer)
    return np.frombuffer(ctypes.string_at(buffer.address, buffer.size), dtype).tolist()


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + count * 4, dtype=np.float32).reshape(count, 4)


def test_several_outputs_of_joined_requests(on_gpu: Opening) -> None:
    opened = on_gpu(add_sub())
    assert isinstance(opened.instance, DeviceArrayInstance)
    before = cuda.COPIES.totals()
    parts = [(rows(1 + number, 100.0 * number), rows(1 + number, 7.0)) for number in range(3)]
    answers = opened.answers(*[request(A=a, B=b) for a, b in parts])
    for (a, b), answer in zip(parts, answers, strict=True):
        np.testing.assert_array_equal(answer["SUM"], a + b)
        np.testing.assert_array_equal(answer["DIFFERENCE"], a - b)
    assert copied(before) == {"to_device": 2, "to_host": 2}


def test_one_of_several_outputs(on_gpu: Opening) -> None:
    opened = on_gpu(add_sub())
    before = cuda.COPIES.totals()
    assert opened.answer(["DIFFERENCE"], A=rows(1), B=rows(1)) == {"DIFFERENCE": pytest.approx(np.zeros((1, 4)))}
    assert copied(before) == {"to_device": 2, "to_host": 1}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (TensorProto.BOOL, np.bool_),
        (TensorProto.UINT8, np.uint8),
        (TensorProto.INT64, np.int64),
        (TensorProto.FLOAT16, np.float16),
        (TensorProto.DOUBLE, np.float64),
        (TensorProto.BFLOAT16, np.uint16),
    ],
)
def test_element_types(on_gpu: Opening, kind: int, dtype: type[np.generic]) -> None:
    opened = on_gpu(identity(kind=kind))
    given = np.arange(8).reshape(2, 4).astype(dtype)
    [response] = opened.execute(request(IN=given, bfloat16=kind == TensorProto.BFLOAT16))
    assert bytes(response.data[0]) == given.tobytes()  # type: ignore[arg-type]


def test_scalars_and_no_elements(on_gpu: Opening) -> None:
    assert on_gpu(scaled(3.0, dims=[])).answer(IN=np.array([2.0], np.float32))["OUT"].tolist() == [6.0]
    opened = on_gpu(scaled(3.0, dims=["N", "M"]))
    assert opened.answer(IN=np.empty((2, 0), np.float32))["OUT"].shape == (2, 0)
    [kept] = opened.execute(keeping(request(IN=np.empty((2, 0), np.float32)), "OUT"))
    assert content(kept.data[0]) == []


def test_strings_out_are_on_the_host(on_gpu: Opening) -> None:
    proto = model(
        [node("Cast", ["IN"], ["TEXT"], to=TensorProto.STRING), node("Neg", ["IN"], ["OUT"])],
        [tensor("IN", ["N", 4], TensorProto.INT32)],
        [tensor("TEXT", ["N", 4], TensorProto.STRING), tensor("OUT", ["N", 4], TensorProto.INT32)],
    )
    opened = on_gpu(proto)
    given = np.arange(8, dtype=np.int32).reshape(2, 4)
    asked = [request(IN=given[:1]), request(IN=given[1:])]
    for number, response in enumerate(opened.execute(*[keeping(each, "TEXT", "OUT") for each in asked])):
        numbers, text = response.data
        assert content(numbers, np.int32) == (-given[number]).tolist()
        assert not isinstance(text, DeviceBuffer)
    assert opened.answer(IN=given)["TEXT"].tolist() == [[b"0", b"1", b"2", b"3"], [b"4", b"5", b"6", b"7"]]


def test_strings_in_are_run_on_arrays(on_gpu: Opening) -> None:
    proto = model(
        [node("Identity", ["TEXT"], ["SAME"]), node("Neg", ["IN"], ["OUT"])],
        [tensor("TEXT", ["N", 1], TensorProto.STRING), tensor("IN", ["N", 1])],
        [tensor("SAME", ["N", 1], TensorProto.STRING), tensor("OUT", ["N", 1])],
    )
    opened = on_gpu(proto)
    assert not isinstance(opened.instance, DeviceArrayInstance)
    answer = opened.answer(TEXT=np.array([[b"a"], [b""]], object), IN=np.array([[1], [2]], np.float32))
    assert (answer["SAME"].tolist(), answer["OUT"].tolist()) == ([[b"a"], [b""]], [[-1], [-2]])


def test_an_input_among_the_outputs(on_gpu: Opening) -> None:
    """It is where the input is, whose memory the next batches use: what is kept has to be a copy."""
    proto = model(
        [node("Neg", ["IN"], ["OUT"])], [tensor("IN", ["N", 4])], [tensor("IN", ["N", 4]), tensor("OUT", ["N", 4])]
    )
    opened = on_gpu(proto)
    before = cuda.COPIES.totals()
    np.testing.assert_array_equal(opened.answer(IN=rows(2))["IN"], rows(2))
    assert copied(before) == {"to_device": 1, "to_host": 2}
    before = cuda.COPIES.totals()
    [kept] = opened.execute(keeping(request(IN=rows(2)), "IN", "OUT"))
    assert copied(before) == {"to_device": 1, "on_device": 1}
    for start in (50.0, 60.0, 70.0):
        opened.answer(IN=rows(2, start))
    assert content(kept.data[0]) == rows(2).ravel().tolist()
    assert content(kept.data[1]) == (-rows(2)).ravel().tolist()


def test_identity(on_gpu: Opening) -> None:
    opened = on_gpu(identity())
    [kept] = opened.execute(keeping(request(IN=rows(2)), "OUT"))
    for start in (50.0, 60.0, 70.0):
        np.testing.assert_array_equal(opened.answer(IN=rows(2, start))["OUT"], rows(2, start))
    assert content(kept.data[0]) == rows(2).ravel().tolist()


def test_a_kept_output_is_the_input_of_another_model(on_gpu: Opening) -> None:
    first, second = on_gpu(scaled(2.0)), on_gpu(scaled(5.0))
    [kept] = first.execute(keeping(request(IN=rows(3)), "OUT"))
    before = cuda.COPIES.totals()
    asked = bare(header([("IN", dtypes.FP32, (3, 4))]), kept.data)  # type: ignore[arg-type]
    [response] = second.execute(asked)
    np.testing.assert_array_equal(decoded(response)["OUT"], rows(3) * 10)
    assert copied(before) == {"to_host": 1}


def test_kept_outputs_outlive_their_model(cuda_frameworks: Any, tmp_path: Path) -> None:
    opened = Opened(tmp_path, scaled(2.0, dims=["N", 4]), kind="GPU")
    [kept] = opened.execute(keeping(request(IN=rows(1 << 18)), "OUT"))
    opened.close()
    del opened
    gc.collect()
    assert content(kept.data[0]) == (rows(1 << 18) * 2).ravel().tolist()


def test_a_failed_run(on_gpu: Opening) -> None:
    """The message is ONNX Runtime's, and the next request is answered."""
    proto = model(
        [node("Reshape", ["IN", "SHAPE"], ["OUT"])],
        [tensor("IN", ["A", "B"]), tensor("SHAPE", [2], TensorProto.INT64)],
        [tensor("OUT", ["C", "D"])],
    )
    opened = on_gpu(proto)
    for _ in range(4):
        with pytest.raises(Internal, match=r"^onnx runtime error: Non-zero status code returned while running Reshape"):
            opened.execute(request(IN=rows(2), SHAPE=np.array([3, 3])))
        assert opened.answer(IN=rows(2), SHAPE=np.array([4, 2]))["OUT"].shape == (4, 2)


def test_run_entries(on_gpu: Opening) -> None:
    parameters = {"memory.enable_memory_arena_shrinkage": {"string_value": "cpu:0"}}
    opened = on_gpu(scaled(2.0), {"parameters": parameters})
    np.testing.assert_array_equal(opened.answer(IN=rows(2))["OUT"], rows(2) * 2)


def test_instances_share_a_session(on_gpu: Opening) -> None:
    opened = on_gpu(add_sub(), {"parameters": {"share_session_between_instances": {"string_value": "true"}}})
    instances = [opened.instance, *(opened.model.instance(InstanceContext(f"m_{n}", "GPU")) for n in (1, 2))]
    assert len(opened.model.shared_copies) == 1

    def ask(number: int) -> Counter[bool]:
        right: Counter[bool] = Counter()
        for turn in range(100):
            a, b = rows(1 + turn % 3, 1000.0 * number + turn), rows(1 + turn % 3, number)
            [response] = instances[number].execute([request(A=a, B=b)], ExecutionTimes())
            right[bool((decoded(response)["SUM"] == a + b).all())] += 1
        return right

    with ThreadPoolExecutor(3) as threads:
        assert sum(threads.map(ask, range(3)), Counter()) == {True: 300}
    for each in instances[1:]:
        each.close()
