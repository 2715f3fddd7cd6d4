"""Batches on a GPU: what is copied and when, which memory is used again, and what a failure leaves behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.backends.arrays.backend import ArrayModel
from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.device import DeviceArrayInstance, DeviceInputs
from nerite.backends.arrays.graph import ModelGraph
from nerite.backends.arrays.instance import ModelInterface
from nerite.backends.configuration import TensorPort
from nerite.backends.interface import ExecutionTimes, InstanceContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, Unavailable
from nerite.core.request import InferenceRequest
from nerite.core.tensor import DeviceBuffer
from nerite.devices import cuda, exchange
from nerite.devices.cuda import CudaEvent, CudaStream
from nerite.devices.dlpack import DeviceArray
from nerite.devices.pools import PinnedPool
from opened import context, decoded, request

COLUMNS = 4


class Copying:
    """A computation whose output is a copy of its input, made by the GPU as often as it is told."""

    device = 0

    def __init__(self, *, streamed: bool) -> None:
        cuda.use(0)
        self._own = CudaStream()
        self.stream = self._own if streamed else None
        self.times = 1
        self.error: Exception | None = None
        self.done = CudaEvent()
        self.addresses: list[int] = []
        self.closed = False

    def launch(
        self, selection: OutputSelection, inputs: DeviceInputs, kept: Collection[str]
    ) -> Sequence[DeviceArray | Any]:
        if self.error is not None:
            raise self.error
        given = inputs["x"]
        assert isinstance(given, DeviceArray)
        self.addresses.append(given.buffer.address)
        size = given.buffer.size
        address = cuda.allocate(max(size, 1))
        for _ in range(self.times):
            self._own.on_device(address, given.buffer.address, size)
        self._own.record(self.done)
        if self.stream is None:
            self._own.wait()
        return [DeviceArray(given.datatype, given.shape, DeviceBuffer(0, address, size, None))]

    def close(self) -> None:
        self.closed = True


class Case:
    def __init__(self, folder: Path, pool: PinnedPool | None, *, streamed: bool) -> None:
        config = {"max_batch_size": 16}
        x, y = (TensorPort(name, dtypes.FP32, (COLUMNS,), (COLUMNS,), True) for name in "xy")
        face = ModelInterface(context(folder, config), [x], [y], failure=lambda error: Internal(f"told: {error}"))
        self.computation = Copying(streamed=streamed)
        self.instance = DeviceArrayInstance(face, self.computation, pool, pool)

    def begin(self, *requests: InferenceRequest) -> Callable[[], list[np.ndarray[Any, Any]]]:
        finish = self.instance.begin(requests, ExecutionTimes())
        return lambda: [decoded(response)["y"] for response in finish()]


@pytest.fixture(params=["streamed", "waiting"])
def case(request: pytest.FixtureRequest, cuda_process: Any, tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path, PinnedPool(1 << 16), streamed=request.param == "streamed")
    yield made
    made.instance.close()
    made.instance.close()  # the second does nothing
    assert made.computation.closed


def rows(count: int, value: float) -> InferenceRequest:
    return request(x=np.full((count, COLUMNS), value, np.float32))


def on_gpu(data: bytes, *, offset: int = 0, keep: bool = False) -> InferenceRequest:
    """Return a request of one row that is on GPU 0, at an offset."""
    asked = rows(1, 0)
    with exchange.stream_on(0) as stream:
        address = cuda.allocate(offset + len(data)) + offset
        stream.to_device(address, np.frombuffer(data, np.uint8).ctypes.data, len(data))
        stream.wait()
    asked.data = [DeviceBuffer(0, address, len(data), None)]
    if keep:
        asked.header = asked.header.with_device_outputs(frozenset("y"))
    return asked


def copied(of: Callable[[], object]) -> dict[str, int]:
    before = cuda.COPIES.totals()
    of()
    return {key: count - before[key][0] for key, (count, _) in cuda.COPIES.totals().items() if count != before[key][0]}


def test_rows_of_several_requests_are_joined_and_parted(case: Case) -> None:
    answers: list[Any] = []
    made = copied(lambda: answers.extend(case.begin(rows(1, 1), rows(3, 2), rows(2, 3))()))
    assert [each[:, 0].tolist() for each in answers] == [[1], [2, 2, 2], [3, 3]]
    assert made == {"to_device": 1, "on_device": 1, "to_host": 1}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation of the GPU takes two milliseconds."""
    monkeypatch.setenv("STAND_IN_CUDA_DELAY_MS", "2")


def test_a_batch_is_finished_while_the_next_one_is_computed(slow: None, cuda_process: Any, tmp_path: Path) -> None:
    case = Case(tmp_path, PinnedPool(1 << 16), streamed=True)
    first = case.begin(rows(1, 1))
    case.computation.times = 300
    second = case.begin(rows(2, 2))
    assert first()[0].tolist() == [[1] * COLUMNS]
    assert cuda.runtime().cudaEventQuery(case.computation.done.event)[0].name == "cudaErrorNotReady"
    assert second()[0].tolist() == [[2] * COLUMNS] * 2
    case.instance.close()


def test_a_batch_is_computed_while_the_next_one_is_copied(slow: None, cuda_process: Any, tmp_path: Path) -> None:
    case = Case(tmp_path, PinnedPool(1 << 16), streamed=False)
    first = case.begin(rows(1, 1))
    second = case.begin(*(on_gpu(bytes(4 * COLUMNS)) for _ in range(100)))
    assert first()[0].tolist() == [[1] * COLUMNS]
    streams = cuda_process.streams.values()
    assert not all(stream.is_idle for stream in streams)
    assert len(second()) == 100 and all(stream.is_idle for stream in streams)
    case.instance.close()


def test_a_third_batch_waits_and_memory_is_used_again(case: Case) -> None:
    finishes = [case.begin(rows(1, value)) for value in (1, 2)]
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(case.begin(rows(1, 3))))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not third
    answers = [finishes[0]()]
    thread.join(10)
    answers += [finishes[1](), third[0]()]
    assert [each[0][0, 0] for each in answers] == [1, 2, 3]
    assert len(set(case.computation.addresses)) == 2


def test_a_tensor_on_the_gpu_is_used_where_it_is(case: Case) -> None:
    data = np.arange(COLUMNS, dtype=np.float32).tobytes()
    asked = on_gpu(data)
    assert copied(lambda: case.begin(asked)()) == {"on_device": 1, "to_host": 1}
    assert case.computation.addresses == [asked.data[0].address]  # type: ignore[union-attr]


def test_one_at_an_address_that_kernels_cannot_read_is_copied_first(case: Case) -> None:
    data = np.arange(COLUMNS, dtype=np.float32).tobytes()
    asked = on_gpu(data, offset=4)
    answers: list[Any] = []
    assert copied(lambda: answers.extend(case.begin(asked)())) == {"on_device": 2, "to_host": 1}
    assert answers[0].tobytes() == data and not case.computation.addresses[0] % 16


def test_outputs_stay_where_they_are_wanted_if_all_want_it(case: Case) -> None:
    data = np.arange(COLUMNS, dtype=np.float32).tobytes()
    (response,) = case.instance.begin([on_gpu(data, keep=True)], ExecutionTimes())()
    (output,) = response.data
    assert isinstance(output, DeviceBuffer) and bytes(exchange.to_host(output)) == data
    both = case.instance.begin([on_gpu(data, keep=True), rows(1, 5)], ExecutionTimes())()
    assert [bytes(response.buffers[0]) for response in both] == [data, np.full(COLUMNS, 5, np.float32).tobytes()]


def test_mixed_memory_is_joined_on_the_gpu(case: Case) -> None:
    data = np.arange(COLUMNS, dtype=np.float32).tobytes()
    answers = case.begin(rows(1, 1), on_gpu(data), rows(1, 2), rows(1, 3))()
    assert answers[1].tobytes() == data and [answers[index][0, 0] for index in (0, 2, 3)] == [1, 2, 3]


def test_no_rows(case: Case) -> None:
    assert case.begin(rows(0, 1))()[0].shape == (0, COLUMNS)


@pytest.mark.parametrize("raised", [ValueError("odd"), Unavailable("out of memory")])
def test_an_instance_works_after_a_failure(case: Case, raised: Exception) -> None:
    for _ in range(5):  # more often than there is memory for batches
        case.computation.error = raised
        with pytest.raises((Internal, Unavailable), match=r"told: odd|out of memory"):
            case.begin(rows(1, 1))()
        case.computation.error = None
        assert case.begin(rows(1, 1))()[0][0, 0] == 1


def test_pinned_memory_comes_back(cuda_process: Any, tmp_path: Path) -> None:
    pool = PinnedPool(1 << 16)
    case = Case(tmp_path, pool, streamed=True)
    responses = case.instance.begin([rows(600, 1)], ExecutionTimes())()
    assert pool.used > 0  # the output is in it
    del responses
    gc.collect()
    assert pool.used == 0
    case.computation.error = ValueError()
    with pytest.raises(Internal):
        case.begin(rows(600, 1))()
    gc.collect()
    assert pool.used == 0
    case.instance.close()


class CopyingModel(ArrayModel[str]):
    """A model that is read from its configuration."""

    def key(self, instance: InstanceContext) -> str:
        return "copy"

    def load(self, key: str) -> str:
        return key

    def ports(self, copy: Any) -> tuple[Sequence[TensorPort], Sequence[TensorPort]]:
        return self.declared(set(), set())

    def graph(self, copy: Any) -> ModelGraph:
        raise AssertionError("the configuration is complete")

    def computation(self, copy: Any, instance: InstanceContext) -> Copying:
        return Copying(streamed=True)


@pytest.mark.parametrize(("off", "blocks"), [("", 2), ("input", 1), ("output", 1)])
def test_pinned_memory_can_be_switched_off(
    cuda_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: str, blocks: int
) -> None:
    """Of a request that is not in it, the inputs are copied into it, and the outputs, unless they are switched off."""
    pool, allocated = PinnedPool(1 << 16), []
    allocate = pool.allocate
    monkeypatch.setattr(pool, "allocate", lambda size: allocated.append(size) or allocate(size))
    entry = {"data_type": "TYPE_FP32", "dims": [COLUMNS]}
    config: dict[str, Any] = {
        "max_batch_size": 16,
        "input": [{"name": "x", **entry}],
        "output": [{"name": "y", **entry}],
    }
    if off:
        config["optimization"] = {f"{off}_pinned_memory": {"enable": False}}
    model = CopyingModel(context(tmp_path, config))
    model.open()
    instance = model.instance(InstanceContext("m_0", "GPU", pinned=pool))
    assert len(instance.execute([rows(2, 1)], ExecutionTimes())) == 1
    assert len(allocated) == blocks
    instance.close()
    model.close()


def test_without_pinned_memory_all_works(cuda_process: Any, tmp_path: Path) -> None:
    case = Case(tmp_path, None, streamed=True)
    assert [each[0, 0] for each in case.begin(rows(1, 1), rows(2, 2))()] == [1, 2]
    case.instance.close()
