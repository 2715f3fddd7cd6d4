"""A Python model at work: what it is told, how it is called, what becomes of its answers."""

from __future__ import annotations

import gc
import json
import logging
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from nerite.backends.interface import ExecutionTimes, InstanceContext
from nerite.backends.python import instance as python_instance
from nerite.core.byte_budget import ByteBudget
from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import to_array
from python_model_cases import CLASS, IMPORTS, executing, method
from python_model_files import TENSORS, execute, instance_of, model_on_disk, request

ECHO = (
    "responses = []",
    "for request in requests:",
    "    array = pb_utils.get_input_tensor_by_name(request, 'INPUT0').as_numpy()",
    "    responses.append(pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', array)]))",
    "return responses",
)


def values(response: InferenceResponse) -> list[object]:
    assert response.error is None
    assert response.header is not None
    spec, data = response.header.outputs[0], response.data[0]
    listed: list[object] = to_array(spec, data).tolist()
    return listed


def model(*methods: str, top: str = "") -> str:
    return IMPORTS + top + CLASS + "\n".join(methods)


def test_what_initialize_is_told(tmp_path: Path) -> None:
    context = model_on_disk(tmp_path, model(method("initialize", "self.args = args")), version=7)
    instance = instance_of(context, InstanceContext("m_0_1", "GPU", 3))
    config = instance.model.args.pop("model_config")
    assert instance.model.args == {
        "model_instance_kind": "GPU",
        "model_instance_name": "m_0_1",
        "model_instance_device_id": "3",
        "model_repository": str(tmp_path / "m"),
        "model_version": "7",
        "model_name": "m",
    }
    assert json.loads(config) == {"max_batch_size": 0, "name": "m", **TENSORS}
    assert ": " not in config


def test_requests_of_any_shapes_come_as_a_list(tmp_path: Path) -> None:
    instance = instance_of(model_on_disk(tmp_path, executing(*ECHO)))
    shapes: list[tuple[int, ...]] = [(1, 3), (1, 7), (2, 2, 2), (0,)]
    answers = execute(instance, *(request(np.ones(shape, np.float32)) for shape in shapes))
    assert [answer.header.outputs[0].shape for answer in answers if answer.header] == shapes


def test_a_large_input_that_is_passed_on_is_not_copied(tmp_path: Path) -> None:
    instance = instance_of(model_on_disk(tmp_path, executing(*ECHO)))
    asked = request(np.arange(1000, dtype=np.float32))
    (answer,) = execute(instance, asked)
    asked.data[0][0:4] = np.float32(9).tobytes()  # type: ignore[index]  # a bytearray
    assert values(answer)[:4] == [9, 1, 2, 3]


def test_a_model_may_write_into_its_input(tmp_path: Path) -> None:
    lines = [*ECHO[:3], "    array += 1", *ECHO[3:]]
    assert values(execute(instance_of(model_on_disk(tmp_path, executing(*lines))))[0]) == [1, 2, 3, 4]


def test_an_array_changed_after_it_was_given(tmp_path: Path) -> None:
    """Contiguous memory is shared, as in Triton; what had to be put into another form is as it was."""
    lines = (
        "whole, half, text = np.zeros(2, np.uint8), np.zeros(4, np.uint8)[::2], np.array([b'x'], object)",
        "tensors = [pb_utils.Tensor(name, array) for name, array in (('W', whole), ('H', half), ('T', text))]",
        "whole += 1; half += 1; text[0] = b'changed'",
        "return [pb_utils.InferenceResponse(tensors)]",
    )
    outputs = [{"name": name} for name in "WHT"]
    (answer,) = execute(instance_of(model_on_disk(tmp_path, executing(*lines), output=outputs)))
    assert [bytes(data) for data in answer.data] == [b"\1\1", b"\0\0", b"\1\0\0\0x"]


def test_equal_answers_share_their_header(tmp_path: Path) -> None:
    instance = instance_of(model_on_disk(tmp_path, executing(*ECHO)))
    one, two = execute(instance, request(np.zeros(2, np.float32)), request(np.ones(2, np.float32)))
    (later,) = execute(instance, request(np.ones(2, np.float32)))
    other_shape, other_type = execute(instance, request(np.zeros(3, np.float32)), request(np.zeros(2, np.float64)))
    assert one.header is two.header is later.header
    assert len({id(answer.header) for answer in (one, other_shape, other_type)}) == 3


def test_ever_new_shapes_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 128 * 1024)
    monkeypatch.setattr(python_instance, "RESPONSE_HEADERS", budget)
    instance = instance_of(model_on_disk(tmp_path, executing(*ECHO)))
    for size in range(0, 500, 1):
        execute(instance, request(np.zeros(size, np.uint8)))
        assert budget.used <= budget.limit
    assert 300 < budget.evictions < 500


def test_parameters_of_a_response(tmp_path: Path) -> None:
    lines = ("return [pb_utils.InferenceResponse([], parameters={'a': 1, 'b': 'x', 'c': True}) for _ in requests]",)
    instance = instance_of(model_on_disk(tmp_path, executing(*lines)))
    (answer,) = execute(instance)
    assert answer.header is not None
    assert answer.header.parameters == {"a": 1, "b": "x", "c": True}


def test_responses_with_and_without_parameters_have_headers_of_their_own(tmp_path: Path) -> None:
    lines = (
        "given = [None, {'a': 1}, {'a': 2}, None]",
        "return [pb_utils.InferenceResponse([], parameters=each) for each in given]",
    )
    answers = execute(instance_of(model_on_disk(tmp_path, executing(*lines))), *(request() for _ in range(4)))
    assert [answer.header.parameters for answer in answers if answer.header] == [{}, {"a": 1}, {"a": 2}, {}]


def test_what_a_model_sees_of_a_request(tmp_path: Path) -> None:
    lines = (
        "self.seen = [",
        "    (r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(), r.is_cancelled(),",
        "     sorted(r.requested_output_names()), r.trace().get_context(), [t.name() for t in r.inputs()])",
        "    for r in requests",
        "]",
        "return [pb_utils.InferenceResponse([]) for _ in requests]",
    )
    instance = instance_of(model_on_disk(tmp_path, executing(*lines)))
    gone = request(
        np.zeros(1),
        np.zeros(2),
        id="abc",
        outputs=["OUTPUT1"],
        sequence_id="s",
        sequence_start=True,
        sequence_end=True,
        timeout_us=500,
        parameters={"custom": "x", "n": 3, "b": True, "f": 1.5},
    )
    gone.cancel()
    execute(instance, request(), gone)
    assert instance.model.seen == [
        ("", 0, 0, 0, "{}", False, ["OUTPUT0", "OUTPUT1"], None, ["INPUT0"]),
        (
            "abc", "s", 3, 500, '{"custom":"x","n":3,"b":true,"f":1.5}', True, ["OUTPUT1"], None,
            ["INPUT0", "INPUT1"],
        ),
    ]  # fmt: skip


def test_the_same_response_for_all(tmp_path: Path) -> None:
    line = "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', np.ones(1))])] * len(requests)"
    answers = execute(instance_of(model_on_disk(tmp_path, executing(line))), request(), request())
    assert [values(answer) for answer in answers] == [[1], [1]]


def test_an_error_of_one_response_leaves_the_others_alone(tmp_path: Path) -> None:
    lines = (
        "good = pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', np.ones(1))])",
        "bad = pb_utils.InferenceResponse(error=pb_utils.TritonError('no', pb_utils.TritonError.UNAVAILABLE))",
        "return [good, bad, good]",
    )
    answers = execute(instance_of(model_on_disk(tmp_path, executing(*lines))), *(request() for _ in range(3)))
    assert [answer.error and (answer.error.http_status, answer.error.message) for answer in answers] == [
        None,
        (503, "no"),
        None,
    ]


def test_nothing_of_a_batch_is_kept(tmp_path: Path) -> None:
    """The memory of inputs is given back when nobody refers to it, without waiting for the garbage collector."""
    instance = instance_of(model_on_disk(tmp_path, executing(*ECHO)))
    memory = np.zeros(1000, np.float32)
    gone = weakref.ref(memory)
    header = request(memory).header
    batch = [InferenceRequest(header, [memory.data.cast("B")], request().sink, 0)]
    del memory
    gc.disable()
    try:
        answers = instance.execute(batch, ExecutionTimes())
        batch.clear()
        assert gone() is not None
        del answers
        assert gone() is None
    finally:
        gc.enable()


def test_timings(tmp_path: Path) -> None:
    instance = instance_of(model_on_disk(tmp_path, executing("self.marks.append(2)", *ECHO)))
    order = instance.model.marks = []

    class Recorder(ExecutionTimes):
        def inputs_ready(self) -> None:
            order.append(1)

        def computed(self) -> None:
            order.append(3)

    instance.execute([request()], Recorder())
    assert order == [1, 2, 3]


# --- Coroutines


def test_a_coroutine_runs_to_its_end(tmp_path: Path) -> None:
    source = model(method("async execute", "import asyncio", "await asyncio.sleep(0)", *ECHO))
    instance = instance_of(model_on_disk(tmp_path, source))
    assert values(execute(instance)[0]) == [0, 1, 2, 3]
    instance.close()


def test_one_loop_serves_all_batches_and_runs_between_them(tmp_path: Path) -> None:
    lines = (
        "loop = asyncio.get_running_loop()",
        "if not hasattr(self, 'loop'):",
        "    self.loop, self.done, self.go = loop, threading.Event(), asyncio.Event()",
        "    async def background():",
        "        await self.go.wait()",
        "        self.done.set()",
        "    self.task = loop.create_task(background())",
        "assert loop is self.loop",
        "return [pb_utils.InferenceResponse([]) for _ in requests]",
    )
    source = model(method("async execute", *lines), top="import asyncio, threading\n")
    instance = instance_of(model_on_disk(tmp_path, source))
    execute(instance)
    execute(instance)
    instance.model.loop.call_soon_threadsafe(instance.model.go.set)
    assert instance.model.done.wait(10), "the loop stands still between batches"
    instance.close()


def test_closing_ends_the_loop_and_what_runs_on_it(tmp_path: Path) -> None:
    lines = (
        "async def forever():",
        "    try:",
        "        await asyncio.Event().wait()",
        "    finally:",
        "        ended.append(True)",
        "self.task = asyncio.get_running_loop().create_task(forever())",
        "await asyncio.sleep(0)",
        "return [pb_utils.InferenceResponse([])]",
    )
    source = model(method("async execute", *lines), top="import asyncio\nended = []\n")
    instance = instance_of(model_on_disk(tmp_path, source))
    before = threading.active_count()
    execute(instance)
    task, ended = instance.model.task, type(instance.model).execute.__globals__["ended"]
    instance.close()
    assert threading.active_count() == before
    assert task.cancelled()
    assert ended == [True]


def test_a_model_without_coroutines_has_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    instance = instance_of(model_on_disk(tmp_path, executing(*ECHO)))
    execute(instance)
    assert threading.active_count() == before


def test_initialize_and_finalize_may_be_coroutines(tmp_path: Path) -> None:
    source = model(
        method("async initialize", "self.steps = steps; steps.append('begin')"),
        "    async def finalize(self):\n        steps.append('end')\n",
        top="steps = []\n",
    )
    instance = instance_of(model_on_disk(tmp_path, source))
    steps = instance.model.steps
    instance.close()
    assert steps == ["begin", "end"]


# --- Ready, finalize, and what is not offered


@pytest.mark.parametrize(
    ("body", "ready"),
    [
        ("    def is_ready(self):\n        return True\n", True),
        ("    def is_ready(self):\n        return False\n", False),
        ("    async def is_ready(self):\n        return True\n", True),
        ("    def is_ready(self):\n        return 1\n", False),
        ("    def is_ready(self):\n        raise OSError('gone')\n", False),
        ("    pass\n", True),
    ],
)
def test_is_ready(body: str, ready: bool, tmp_path: Path) -> None:
    instance = instance_of(model_on_disk(tmp_path, IMPORTS + CLASS + body))
    assert instance.is_ready() is ready
    instance.close()


def test_is_ready_that_hangs_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nerite.backends.python.instance.READY_LIMIT", 0.01)
    source = model("    async def is_ready(self):\n        import asyncio; await asyncio.Event().wait()\n")
    instance = instance_of(model_on_disk(tmp_path, source))
    assert not instance.is_ready()
    assert "is_ready of 'm_0' failed: TimeoutError" in caplog.text
    instance.close()


def test_finalize_is_called_and_its_errors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = model("    def finalize(self):\n        raise ValueError('end')\n")
    instance = instance_of(model_on_disk(tmp_path, source))
    instance.close()
    assert f"finalize of 'm_0' failed: ValueError: end\n\nAt:\n  {tmp_path}/m/1/model.py(7): finalize" in caplog.text


def test_a_failed_batch_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instance = instance_of(model_on_disk(tmp_path, executing("raise ValueError('bad')")))
    with caplog.at_level(logging.ERROR), pytest.raises(Internal):
        execute(instance)
    assert "Failed to process the request(s) for model 'm_0', message: ValueError: bad" in caplog.text


def test_ctrl_c_is_not_an_error_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(instance_of(model_on_disk(tmp_path, executing("raise KeyboardInterrupt"))))


@pytest.mark.parametrize("statement", ["raise SystemExit", "raise __import__('asyncio').CancelledError"])
def test_a_model_cannot_end_the_process(statement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = model(
        method("execute", statement),
        f"    async def is_ready(self):\n        {statement}\n\n    def finalize(self):\n        {statement}\n",
    )
    instance = instance_of(model_on_disk(tmp_path, source))
    with pytest.raises(Internal, match=r"message: (SystemExit|CancelledError): <EMPTY MESSAGE>"):
        execute(instance)
    assert not instance.is_ready()
    instance.close()
    assert "finalize of 'm_0' failed" in caplog.text
