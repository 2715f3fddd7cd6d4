"""Models that answer by a response sender."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from nerite.backends.interface import ExecutionTimes
from nerite.backends.python.instance import PythonInstance
from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from python_model_cases import CLASS, IMPORTS, executing
from python_model_files import execute, instance_of, model_on_disk, request
from triton_python_backend_utils import TritonModelException

DECOUPLED = {"decoupled": True}
RESPONSE = "pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', np.ones(1, np.float32))])"
FINAL = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"


class Caller:
    """A sink that takes any number of responses."""

    def __init__(self) -> None:
        self.came: list[tuple[InferenceResponse, bool]] = []
        self.over = threading.Event()

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.came.append((response, final))
        if final:
            self.over.set()

    @property
    def kinds(self) -> list[str]:
        return [
            ("error" if response.error else "empty" if response.empty else "response") + (" last" if final else "")
            for response, final in self.came
        ]


class StreamingRequest(InferenceRequest):
    streams = True


def streaming() -> tuple[InferenceRequest, Caller]:
    plain, caller = request(), Caller()
    return StreamingRequest(plain.header, plain.data, caller, 0), caller


def model(*lines: str) -> str:
    return IMPORTS + CLASS + "\n".join(lines)


def decoupled(folder: Path, *lines: str) -> PythonInstance:
    return instance_of(model_on_disk(folder, executing(*lines), model_transaction_policy=DECOUPLED))


def single(folder: Path, *lines: str) -> PythonInstance:
    return instance_of(model_on_disk(folder, executing(*lines)))


def run(instance: PythonInstance) -> tuple[list[Any], Caller]:
    asked, caller = streaming()
    return list(instance.execute([asked], ExecutionTimes())), caller


def test_any_number_of_responses(tmp_path: Path) -> None:
    instance = decoupled(
        tmp_path,
        "sender = requests[0].get_response_sender()",
        f"sender.send({RESPONSE})",
        "sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError('bad')))",
        f"sender.send({FINAL})",
    )
    returned, caller = run(instance)
    assert returned == [None]
    assert caller.kinds == ["response", "error", "empty last"]


def test_a_thread_sends_after_execute_has_returned(tmp_path: Path) -> None:
    instance = decoupled(
        tmp_path,
        "import threading",
        "self.gate = threading.Event()",
        "sender = requests[0].get_response_sender()",
        f"work = lambda: (self.gate.wait(), sender.send({RESPONSE}, {FINAL}))",
        "self.thread = threading.Thread(target=work)",
        "self.thread.start()",
    )
    returned, caller = run(instance)
    assert (returned, caller.came) == ([None], [])
    instance.model.gate.set()
    thread: threading.Thread = instance.model.thread
    thread.join()
    assert caller.kinds == ["response last"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "Inference Response object must be provided when the response flags is set to zero."),
        (f"{RESPONSE}, flags=2", "Unable to send response. Unsupported flag provided."),
        ("'text'", "send(): incompatible function arguments."),
    ],
)
def test_what_cannot_be_sent(tmp_path: Path, arguments: str, told: str) -> None:
    instance = decoupled(tmp_path, f"requests[0].get_response_sender().send({arguments})")
    with pytest.raises(Internal) as error:
        run(instance)
    assert told in error.value.message


def test_nothing_follows_the_last(tmp_path: Path) -> None:
    instance = decoupled(
        tmp_path,
        "sender = requests[0].get_response_sender()",
        f"sender.send({FINAL})",
        f"sender.send({RESPONSE})",
    )
    with pytest.raises(Internal, match=r"Unable to send response\. Response sender has been closed\."):
        run(instance)


@pytest.mark.parametrize("returned", ["[]", f"[{RESPONSE}]", "1"])
def test_a_decoupled_model_returns_nothing(tmp_path: Path, returned: str) -> None:
    instance = decoupled(tmp_path, f"return {returned}")
    with pytest.raises(
        Internal, match=r"Python model 'm_0' is using the decoupled mode and the execute function must return None\."
    ):
        run(instance)


def test_a_model_that_is_not_decoupled_may_send_its_one_response(tmp_path: Path) -> None:
    instance = single(
        tmp_path,
        "requests[0].get_response_sender().send(" + RESPONSE + ", " + FINAL + ")",
        f"return [None, {RESPONSE}]",
    )
    first, caller = streaming()
    second, _ = streaming()
    returned = list(instance.execute([first, second], ExecutionTimes()))
    assert returned[0] is None
    assert returned[1] is not None
    assert caller.kinds == ["response last"]


def test_a_request_that_is_ended_without_its_one_response(tmp_path: Path) -> None:
    """The caller is told, and so is the model."""
    instance = single(tmp_path, "requests[0].get_response_sender().send(" + FINAL + ")")
    asked, caller = streaming()
    with pytest.raises(Internal, match="Non-decoupled model cannot send complete final before sending a response"):
        instance.execute([asked], ExecutionTimes())
    ((response, final),) = caller.came
    assert response.error is not None and final
    assert response.error.message.startswith("Unable to send response. Non-decoupled model cannot send complete final")
    assert response.error.message.endswith("model_transaction_policy { decoupled: true }.")


def test_a_thread_that_ends_a_request_without_its_one_response(tmp_path: Path) -> None:
    instance = single(
        tmp_path,
        "import threading",
        "def late(sender):",
        "    try:",
        f"        sender.send({FINAL})",
        "    except pb_utils.TritonModelException as error:",
        "        self.told = str(error)",
        "threading.Thread(target=late, args=(requests[0].get_response_sender(),)).start()",
        "return [None]",
    )
    returned, caller = run(instance)
    assert returned == [None]
    assert caller.over.wait(20)
    assert caller.kinds == ["error last"]


def test_one_response_is_all_that_is_taken(tmp_path: Path) -> None:
    instance = single(
        tmp_path,
        "sender = requests[0].get_response_sender()",
        f"sender.send({RESPONSE})",
        f"sender.send({RESPONSE}, {FINAL})",
    )
    asked, caller = streaming()
    with pytest.raises(Internal, match=r"Non-decoupled model cannot send more than one response\."):
        instance.execute([asked], ExecutionTimes())
    assert caller.kinds == ["response", "error last"]


def test_none_without_a_sender_is_no_answer(tmp_path: Path) -> None:
    (answer,), caller = run(single(tmp_path, "return [None]"))
    assert "Expected an 'InferenceResponse' object" in answer.error.message
    assert caller.came == []


def test_a_response_that_cannot_be_sent_reaches_the_caller_as_an_error(tmp_path: Path) -> None:
    instance = decoupled(
        tmp_path,
        "response = pb_utils.InferenceResponse([], parameters={'a': 2**64})",
        f"requests[0].get_response_sender().send(response, {FINAL})",
    )
    _, caller = run(instance)
    assert caller.kinds == ["error last"]


def test_async_executes_run_side_by_side(tmp_path: Path) -> None:
    """The second lets the first go on."""
    source = model(
        "    async def execute(self, requests):",
        "        import asyncio",
        "        self.events = getattr(self, 'events', []) + [asyncio.Event()]",
        "        first = len(self.events) == 1",
        "        sender = requests[0].get_response_sender()",
        "        if first:",
        "            await self.events[0].wait()",
        "        else:",
        "            self.events[0].set()",
        f"        sender.send({RESPONSE}, {FINAL})",
    )
    instance = instance_of(model_on_disk(tmp_path, source, model_transaction_policy=DECOUPLED))
    callers = [run(instance)[1] for _ in range(2)]
    for caller in callers:
        caller.over.wait(20)
        assert caller.kinds == ["response last"]


@pytest.mark.parametrize("line", ["raise ValueError('bad')", "return []"])
def test_an_async_execute_that_ends_badly_answers_what_is_open(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = model(
        "    async def execute(self, requests):",
        "        requests[0].get_response_sender().send(" + RESPONSE + ")",
        f"        {line}",
    )
    instance = instance_of(model_on_disk(tmp_path, source, model_transaction_policy=DECOUPLED))
    returned, caller = run(instance)
    assert returned == [None]
    caller.over.wait(20)
    assert caller.kinds == ["response", "error last"]
    assert "Failed to process the request(s) for model 'm_0'" in caplog.text


def test_the_sender_is_always_the_same(tmp_path: Path) -> None:
    instance = decoupled(
        tmp_path,
        "sender = requests[0].get_response_sender()",
        "assert requests[0].get_response_sender() is sender",
        f"sender.send({FINAL})",
    )
    assert run(instance)[1].kinds == ["empty last"]


def test_models_see_that_nobody_waits(tmp_path: Path) -> None:
    instance = decoupled(
        tmp_path,
        "sender = requests[0].get_response_sender()",
        "self.seen = isinstance(sender, pb_utils.InferenceResponseSender)",
        "self.seen = self.seen, sender.is_cancelled(), requests[0].is_cancelled()",
        f"sender.send({FINAL})",
    )
    asked, _ = streaming()
    asked.cancel()
    instance.execute([asked], ExecutionTimes())
    assert instance.model.seen == (True, True, True)


def test_in_process_there_is_no_sender(tmp_path: Path) -> None:
    with pytest.raises(Internal, match="remove EXECUTION_MODE in_process from"):
        execute(decoupled(tmp_path, "requests[0].get_response_sender()"))
    assert issubclass(TritonModelException, Exception)
