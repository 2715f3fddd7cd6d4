"""Models that call other models: one by one, at once, for many answers; and what their calls inherit."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from laboratory import COUNTER, laboratory, said, waiting_for
from nerite.workers.child.bls import WINDOW
from serving import IDENTITY, Serving, ensemble, eventually, pbtxt, python_model, serving, step

TELLING = """
def execute(self, requests):
    answers = []
    for request in requests:
        print("telling", request.request_id(), request.timeout(), request.parameters(), flush=True)
        told = np.array([[request.timeout(), request.correlation_id(), request.flags()]], np.float32)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", told)]))
    return answers
"""
FAILING = """
def execute(self, requests):
    if requests[0].inputs()[0].as_numpy()[0, 0] > 1:
        raise ValueError("no")
    error = pb_utils.TritonError("nobody here", pb_utils.TritonError.NOT_FOUND)
    return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
INSIDE = """
def execute(self, requests):
    pb_utils.InferenceRequest(model_name="echo", requested_output_names=[], inputs=requests[0].inputs()).exec()
"""
EARLY = """
def initialize(self, args):
    call = pb_utils.InferenceRequest(model_name="echo", requested_output_names=[], inputs=[])
    try:
        call.exec()
    except pb_utils.TritonModelException as error:
        print("too early:", error, flush=True)

def execute(self, requests):
    return [pb_utils.InferenceResponse([]) for _ in requests]
"""
MANY = """
def execute(self, requests):
    calls = [pb_utils.InferenceRequest(
        model_name="telling", requested_output_names=[], inputs=request.inputs(), trace=request.trace()
    ) for request in requests]
    return [pb_utils.InferenceResponse(call.exec().output_tensors()) for call in calls]
"""


STOPPING = COUNTER.replace(
    "break",
    "sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError('stopped', "
    "pb_utils.TritonError.CANCELLED)), flags=1)\n                return",
)
UNMOVED = COUNTER.replace("sender.is_cancelled()", "False")
DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("calls")
    models = laboratory(folder / "models")
    python_model(models, "telling", TELLING)
    python_model(models, "failing", FAILING)
    in_process = 'parameters { key: "EXECUTION_MODE" value: { string_value: "in_process" } }'
    python_model(models, "inside", INSIDE, pbtxt(parameters=in_process))
    python_model(models, "early", EARLY)
    python_model(models, "many", MANY)
    python_model(models, "stopping", STOPPING, pbtxt(batch=1, more=DECOUPLED))
    python_model(models, "unmoved", UNMOVED, pbtxt(batch=1, more=DECOUPLED))
    with serving(models, folder / "log") as running:
        yield running


def test_one_call(server: Serving) -> None:
    assert said(server, "tell(ask().exec())") == ["[[1.0, 2.0]]"]


@pytest.mark.parametrize("model", ["lab", "alab"])
def test_calls_one_after_the_other(server: Serving, model: str) -> None:
    program = "for number in range(50):\n    tell(ask(value=[number]).exec())"
    assert said(server, program, model) == [f"[[{number}.0]]" for number in range(50)]


def test_calls_at_once(server: Serving) -> None:
    program = """
calls = [ask(value=[number]).async_exec() for number in range(50)]
for response in await asyncio.gather(*calls):
    tell(response)
"""
    assert said(server, program, "alab") == [f"[[{number}.0]]" for number in range(50)]


def test_calls_at_once_in_a_loop_of_the_models_own(server: Serving) -> None:
    program = """
import asyncio
async def main():
    return await asyncio.gather(*[ask(value=[number]).async_exec() for number in range(5)])
for response in asyncio.run(main()):
    tell(response)
"""
    assert said(server, program) == [f"[[{number}.0]]" for number in range(5)]


def test_calls_from_threads(server: Serving) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as threads:
    for response in threads.map(lambda number: ask(value=[number]).exec(), range(40)):
        tell(response)
"""
    assert said(server, program) == [f"[[{number}.0]]" for number in range(40)]


def test_large_tensors_there_and_back(server: Serving) -> None:
    program = """
value = np.arange(300_000, dtype=np.float32)
for _ in range(20):
    (output,) = ask(value=value).exec().output_tensors()
    assert (output.as_numpy() == value).all()
    (output,) = ask(value=output.as_numpy()[0]).exec().output_tensors()
    assert (output.as_numpy() == value).all()
say("as it was")
"""
    assert said(server, program) == ["as it was"]


def test_an_answer_may_be_kept_and_changed(server: Serving) -> None:
    program = """
value = np.zeros(100_000, dtype=np.float32)
kept = [ask(value=value + number).exec().output_tensors()[0].as_numpy() for number in range(8)]
kept[3][:] = 33
say([int(each[0, -1]) for each in kept], [int(each[0, 0]) for each in kept])
"""
    assert said(server, program) == ["[0, 1, 2, 33, 4, 5, 6, 7] [0, 1, 2, 33, 4, 5, 6, 7]"]


def test_inputs_are_passed_on(server: Serving) -> None:
    program = "call = ask('lab'); call._inputs = [pb_utils.Tensor('PROGRAM', np.array([b'say(5)'], object))]"
    assert said(server, program.replace("'lab'", "'alab'") + "\ncall._requested = {'SAID'}\ntell(call.exec())") == [
        "[b'5']"
    ]


def test_many_answers(server: Serving) -> None:
    program = "for response in ask('counter', [3.0]).exec(decoupled=True):\n    tell(response)"
    assert said(server, program) == ["[[0.0]]", "[[1.0]]", "[[2.0]]", "nothing"]


def test_many_answers_in_a_coroutine(server: Serving) -> None:
    program = """
responses = await ask('counter', [40.0]).async_exec(decoupled=True)
async for response in responses:
    tell(response)
say(list(responses))
"""
    assert said(server, program, "alab") == [f"[[{number}.0]]" for number in range(40)] + ["nothing", "[]"]


def test_a_model_with_one_answer_gives_one(server: Serving) -> None:
    program = "for response in ask().exec(decoupled=True):\n    tell(response)"
    assert said(server, program) == ["[[1.0, 2.0]]"]


def test_whoever_does_not_read_is_not_sent_more(server: Serving, tmp_path: Path) -> None:
    go = tmp_path / "go"
    program = f"""
responses = ask('counter', [10000.0]).exec(decoupled=True)
next(responses)
{waiting_for(go)}
say(len([None for _ in responses]))
"""
    before = server.text.count("sent ")
    with ThreadPoolExecutor() as threads:
        counted = threads.submit(said, server, program)
        try:
            eventually(lambda: server.text.count("sent ") >= before + WINDOW)
            # While these are asked a model that nobody stops would send all it has.
            for _ in range(200):
                said(server, "tell(ask().exec())", "alab")
            assert server.text.count("sent ") < before + 5000
        finally:
            go.touch()
        assert counted.result() == ["10000"]


@pytest.mark.parametrize("end", ["responses.cancel()", "del responses"])
def test_answers_that_nobody_wants(server: Serving, end: str) -> None:
    before = server.text.count("cancelled")
    program = f"""
responses = ask('counter', [100000.0]).exec(decoupled=True)
say(isinstance(responses, pb_utils.ResponseIterator))
tell(next(responses))
{end}
tell(ask().exec())
"""
    assert said(server, program) == ["True", "[[0.0]]", "[[1.0, 2.0]]"]
    eventually(lambda: server.text.count("cancelled") > before)


CANCELLED = """
responses = {call}
tell(next(responses))
responses.cancel()
responses.cancel()
for response in responses:
    last = response
tell(last)
say(list(responses))
responses.cancel()
tell({after})
"""


@pytest.mark.parametrize(
    ("model", "call", "after"),
    [
        ("lab", "ask({}).exec(decoupled=True)", "ask().exec()"),
        ("alab", "await ask({}).async_exec(decoupled=True)", "await ask().async_exec()"),
    ],
)
def test_the_called_model_says_how_a_cancelled_call_ends(server: Serving, model: str, call: str, after: str) -> None:
    program = CANCELLED.format(call=call.format("'stopping', [100000.0]"), after=after)
    assert said(server, program, model) == ["[[0.0]]", "CANCELLED stopped", "[]", "[[1.0, 2.0]]"]
    program = CANCELLED.format(call=call.format("'unmoved', [20.0]"), after=after)
    assert said(server, program, model) == ["[[0.0]]", "nothing", "[]", "[[1.0, 2.0]]"]


def test_a_cancelled_call_that_waits_does_not_run(server: Serving) -> None:
    program = """
first, second = (ask("patient", [1.0]).exec(decoupled=True) for _ in range(2))
second.cancel()
tell(next(second))
first.cancel()
tell(next(first))
"""
    assert said(server, program) == ["CANCELLED ", "nothing"]


def test_a_call_that_is_given_up(server: Serving) -> None:
    before = server.text.count("cancelled")
    program = """
try:
    await asyncio.wait_for(ask("patient", [1.0]).async_exec(), 0.05)
except TimeoutError:
    say("too long")
"""
    assert said(server, program, "alab") == ["too long"]
    eventually(lambda: server.text.count("cancelled") > before)


def test_a_client_that_goes_takes_the_calls_along(server: Serving) -> None:
    waiting, cancelled = server.text.count("waiting"), server.text.count("cancelled")
    host, port = server.http.split(":")
    tensor = {"name": "PROGRAM", "shape": [1], "datatype": "BYTES", "data": ["tell(ask('patient', [1.0]).exec())"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = b"POST /v2/models/lab/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)
        eventually(lambda: server.text.count("waiting") > waiting)
    eventually(lambda: server.text.count("cancelled") > cancelled)
    assert said(server, "say(request.is_cancelled())") == ["False"]


def test_what_a_call_says(server: Serving) -> None:
    program = (
        "tell(ask('telling', request_id='own', correlation_id=7, flags=3, timeout=99, parameters={'a': 1}).exec())"
    )
    assert said(server, program, id="parent") == ["[[99.0, 7.0, 3.0]]"]
    assert "[request id: own] telling own 99 " in server.text


def test_what_a_call_inherits(server: Serving) -> None:
    (answer,) = said(server, "tell(ask('telling').exec())", id="parent", parameters={"timeout": 60_000_000})
    timeout, *rest = json.loads(answer)[0]
    assert 0 < timeout <= 60_000_000
    assert rest == [0, 0]
    assert "telling parent " in server.text


def test_a_request_is_named_as_the_parent(server: Serving) -> None:
    def ask(number: int) -> tuple[int, dict[str, str], bytes]:
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}
        return server.ask("POST", "/v2/models/many/infer", {"inputs": [tensor], "id": f"child of {number}"})

    with ThreadPoolExecutor(8) as threads:
        assert {status for status, _, _ in threads.map(ask, range(8))} == {200}
    assert [number for number in range(8) if f"telling child of {number} 0 {{}}" not in server.text] == []


NOT_QUEUED = {
    "ask('nobody')": (
        "NOT_FOUND Model nobody - Error when running inference: Failed for execute the inference request. Model "
        "'nobody' is not ready.\n    Request for unknown model: 'nobody' is not found"
    ),
    "ask(model_version=3)": (
        "NOT_FOUND Model echo - Error when running inference: Failed for execute the inference request. Model 'echo' "
        "is not ready.\n    Request for unknown model: 'echo' version 3 is not found"
    ),
    "ask(value=[[1.0]])": "INVALID_ARG Model echo - Error when running inference: [request id: <id_unknown>] unexp",
    "ask('counter')": (
        "UNSUPPORTED Model counter - Error when running inference: Model counter is using the decoupled. The current "
        "BLS request call doesn't support models using the decoupled transaction policy. Please use 'decoupled=True'"
    ),
    "ask('failing')": "NOT_FOUND nobody here",
    "ask('failing', [2.0])": "INTERNAL Failed to process the request(s) for model 'failing_0_0', message: V",
}


ONE, ASYNC, SEVERAL = "tell({}.exec())", "tell(await {}.async_exec())", "tell(next({}.exec(decoupled=True)))"


@pytest.mark.parametrize(
    ("call", "way"),
    [(call, way) for call in NOT_QUEUED for way in (ONE, ASYNC, SEVERAL) if "counter" not in call or way != SEVERAL],
)
def test_errors_are_responses(server: Serving, call: str, way: str) -> None:
    model = "alab" if "await" in way else "lab"
    assert "\n".join(said(server, way.format(call), model)).startswith(NOT_QUEUED[call])


def test_a_call_needs_a_worker(server: Serving) -> None:
    with pytest.raises(RuntimeError, match="only from a worker: leave EXECUTION_MODE in_process out"):
        server.infer("inside", [1.0])


def test_calls_are_for_execute(server: Serving) -> None:
    assert "too early: BLS is only supported during the 'execute' function." in server.text


def test_who_is_ready(server: Serving) -> None:
    program = (
        "say([pb_utils.is_model_ready(*of) for of in (('echo',), ('echo', '1'), ('echo', '2'), ('no',), ('lab',))])"
    )
    assert said(server, program) == ["[True, True, False, False, True]"]


def test_loading_needs_explicit_mode(server: Serving) -> None:
    with pytest.raises(RuntimeError, match="explicit model load / unload is not allowed if polling is enabled"):
        said(server, "pb_utils.load_model('echo')")


FORKING = """
import multiprocessing
processes = multiprocessing.get_context("fork")

def told(*calls):
    def child(queue):
        for call in calls:
            try:
                queue.put(repr(call()))
            except Exception as error:
                queue.put(f"{type(error).__name__} {error}")

    queue = processes.SimpleQueue()
    process = processes.Process(target=child, args=(queue,))
    process.start()
    try:
        return [queue.get() for _ in calls]
    finally:
        process.join()
"""
FORKED = "A process that a model has forked cannot ask the server, or send responses"


@pytest.mark.parametrize("model", ["lab", "alab"])
def test_a_forked_process_cannot_ask_the_server(server: Serving, model: str) -> None:
    program = f"""
{FORKING}
kept = ask('counter', [3.0]).exec(decoupled=True)
for line in told(
    ask().exec,
    lambda: ask().exec(decoupled=True),
    lambda: pb_utils.is_model_ready("echo"),
    lambda: pb_utils.load_model("echo"),
    request.is_cancelled,
    lambda: next(kept),
    kept.cancel,
    lambda: kept.__del__(),
):
    say(line)
tell(ask().exec())
for response in kept:
    tell(response)
"""
    lines = said(server, program, model)
    assert [line.partition(FORKED)[0] for line in lines[:7]] == [
        "TritonModelException ",
        "TritonModelException ",
        "TritonModelException Failed to ask after model: ",
        "TritonModelException Failed to load model: ",
        "TritonModelException ",
        "TritonModelException ",
        "TritonModelException ",
    ]
    assert lines[7:] == ["None", "[[1.0, 2.0]]", "[[0.0]]", "[[1.0]]", "[[2.0]]", "nothing"]


def test_a_forked_process_cannot_send_responses(server: Serving) -> None:
    program = f"""
{FORKING}
sender = request.get_response_sender()
(line,) = told(lambda: sender.send(pb_utils.InferenceResponse([]), 1))
say(line)
"""
    (line,) = said(server, program)
    assert line.startswith(f"TritonModelException {FORKED}")
    assert said(server, "tell(ask().exec())") == ["[[1.0, 2.0]]"]


def test_what_a_forked_process_says_is_in_the_log(server: Serving) -> None:
    """It writes to its standard error: on the channel it would write into the middle of the parent's messages."""
    program = f"""
import logging
{FORKING}
def lines():
    print("printed in the fork", flush=True)
    logging.getLogger("child").warning("logged in the fork")
    pb_utils.Logger.log_error("an error in the fork")

inside, told_all = threading.Event(), threading.Event()
def hold(channel):
    with channel:  # as if this thread sent something large
        inside.set()
        told_all.wait()

worker = host.current.outbox
holding = threading.Thread(target=hold, args=(worker._sending,))
holding.start()
inside.wait()
answers = told(lines)
told_all.set()
holding.join()
say(*answers)
"""
    program = f"import threading\nfrom nerite.core import model_calls as host\n{program}"
    assert said(server, program, id="forking") == ["None"]
    for line in ("printed in the fork", "logged in the fork", "an error in the fork"):
        eventually(lambda line=line: line in server.text)
    assert said(server, "tell(ask().exec())") == ["[[1.0, 2.0]]"]


def test_a_fork_that_returns_from_execute_ends(server: Serving) -> None:
    program = """
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    say(os.waitstatus_to_exitcode(status))
"""
    assert said(server, program) == ["70"]
    assert said(server, "tell(ask().exec())") == ["[[1.0, 2.0]]"]


def test_callers_and_called_are_counted(server: Serving) -> None:
    def count(model: str) -> int:
        stats = server.json("GET", f"/v2/models/{model}/stats")["model_stats"][0]
        return int(stats["inference_stats"]["success"]["count"])

    lab, echo = count("lab"), count("echo")
    said(server, "for _ in range(3):\n    ask().exec()")
    assert (count("lab"), count("echo")) == (lab + 1, echo + 3)


# --- Waits that would never end


def test_a_model_that_waits_for_itself(server: Serving) -> None:
    program = """
call = pb_utils.InferenceRequest(model_name="{}", requested_output_names=[], inputs=request.inputs())
tell({})
"""
    refusal = (
        "UNAVAILABLE Model {0} - Error when running inference: model '{0}' can never answer this call: each model "
    )
    one = said(server, program.format("lab", "call.exec()"))[0]
    assert one.startswith(refusal.format("lab"))
    assert "waits for the next in lab -> lab" in one
    assert said(server, program.format("alab", "await call.async_exec()"), "alab")[0].startswith(refusal.format("alab"))
    served = "request.exec()"
    assert said(server, f"tell({served})")[0].startswith(refusal.format("lab"))


def test_models_that_wait_for_each_other(server: Serving) -> None:
    inner = "inner = pb_utils.InferenceRequest(model_name='lab', requested_output_names=[], inputs=request.inputs())"
    program = f"""
program = '''{inner}
tell(await inner.async_exec())'''
inputs = [pb_utils.Tensor("PROGRAM", np.array([program.encode()], object))]
tell(pb_utils.InferenceRequest(model_name="alab", requested_output_names=[], inputs=inputs).exec())
"""
    (line,) = said(server, program)
    assert "model 'lab' can never answer this call: each model waits for the next in lab -> alab -> lab" in line


def test_a_call_that_is_refused_while_another_is_answered(server: Serving) -> None:
    program = """
itself = pb_utils.InferenceRequest(model_name="alab", requested_output_names=[], inputs=request.inputs())
for response in await asyncio.gather(itself.async_exec(), ask().async_exec()):
    tell(response)
"""
    first, *_, last = said(server, program, "alab")
    assert "model 'alab' can never answer this call" in first
    assert last == "[[1.0, 2.0]]"


def test_many_that_exhaust_the_instances_together(tmp_path: Path) -> None:
    models = laboratory(tmp_path / "models", instances=2)
    there = "pb_utils.InferenceRequest(model_name='{}', requested_output_names=[], inputs=inputs)"
    program = f"""
deeper = '''
inputs = [pb_utils.Tensor("PROGRAM", np.array([b"say(1)"], object))]
tell({{call}}.exec())'''
inputs = [pb_utils.Tensor("PROGRAM", np.array([deeper.replace("{{call}}", {there.format("lab")!r}).encode()], object))]
response = {there.format("alab")}.exec()
tell(response)
"""
    with serving(models, tmp_path / "log") as server, ThreadPoolExecutor(12) as threads:
        answers = [" ".join(answer) for answer in threads.map(lambda _: said(server, program), range(60))]
        good = [answer for answer in answers if answer == "[b\"[b'1']\"]"]
        refused = [answer for answer in answers if "can never answer this call" in answer]
        assert len(good) + len(refused) == 60
        assert good
        assert " ".join(said(server, program)) == "[b\"[b'1']\"]"


def test_a_model_with_two_instances_may_call_itself(tmp_path: Path) -> None:
    models = laboratory(tmp_path / "models", instances=2)
    program = """
inputs = [pb_utils.Tensor("PROGRAM", np.array([b"say(2)"], object))]
tell(pb_utils.InferenceRequest(model_name="lab", requested_output_names=[], inputs=inputs).exec())
"""
    with serving(models, tmp_path / "log") as server:
        assert said(server, program) == ["[b'2']"]


ROUND = """
def execute(self, requests):
    call = pb_utils.InferenceRequest(
        model_name="both", requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=requests[0].inputs()
    )
    response = call.exec()
    return [pb_utils.InferenceResponse(response.output_tensors(), response.error())]
"""
SLOW = """
def execute(self, requests):
    time.sleep(0.05)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each.inputs()[0].as_numpy())]) for each in requests]
"""


def test_a_wait_that_goes_through_an_ensemble(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "round", ROUND, pbtxt(batch=1, more=""))
    python_model(models, "slow", SLOW, pbtxt(batch=1, more=""))
    steps = step("round", "INPUT0", "OUTPUT0"), step("slow", "INPUT0", "OUTPUT1")
    ensemble(models, "both", *steps, outputs=("OUTPUT0", "OUTPUT1"))
    with serving(models, tmp_path / "log") as server:
        # Either is asked first: with the slow one under way, it is not for ever yet.
        for model in ("round", "both", "round"):
            with pytest.raises(RuntimeError, match="can never answer this call: each model waits for the next in"):
                server.infer(model, [1.0])


def test_traces_of_calls_belong_to_that_of_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    flags = [f"--trace-config=triton,file={file}", "--trace-config=rate=1", "--trace-config=level=TIMESTAMPS"]
    with serving(laboratory(tmp_path / "models"), tmp_path / "log", *flags) as server:
        said(server, "tell(ask().exec())", id="parent")
    first = {each["model_name"]: each for each in json.loads(file.read_text()) if "model_name" in each}
    assert first["echo"]["parent_id"] == first["lab"]["id"]
    assert "parent_id" not in first["lab"]


# --- Loading and unloading


def test_a_model_loads_and_unloads_others(tmp_path: Path) -> None:
    models = laboratory(tmp_path / "models")
    program = """
tell(ask("late").exec())
pb_utils.load_model("late")
say(pb_utils.is_model_ready("late"))
tell(ask("late").exec())
pb_utils.unload_model("late")
say(pb_utils.is_model_ready("late"))
try:
    pb_utils.load_model("nobody")
except pb_utils.TritonModelException as error:
    say(error)
"""
    python_model(models, "late", IDENTITY)
    flags = ["--model-control-mode=explicit", "--load-model=lab", "--load-model=alab"]
    with serving(models, tmp_path / "log", *flags) as server:
        for model in ("lab", "alab"):
            before, _, *after = said(server, program, model)
            assert "Model 'late' is not ready." in before
            assert after == [
                "True",
                "[[1.0, 2.0]]",
                "False",
                f"Failed to load model: Failed to process the request for model '{model}_0_0', message: failed to load "
                "'nobody', failed to poll from model repository",
            ]


def test_a_model_is_delivered(tmp_path: Path) -> None:
    models = laboratory(tmp_path / "models")
    program = """
import json, pathlib
code = (pathlib.Path(pb_utils.get_model_dir()).parents[1] / "echo" / "1" / "model.py").read_bytes()
tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
config = {"backend": "python", "max_batch_size": 8,
          "input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}
pb_utils.load_model("fresh", config=json.dumps(config), files={"file:1/model.py": code + bytes(0) * 10})
tell(ask("fresh").exec())
"""
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=lab") as server:
        assert said(server, program) == ["[[1.0, 2.0]]"]


def test_a_model_unloads_itself(tmp_path: Path) -> None:
    models = laboratory(tmp_path / "models")
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=lab") as server:
        assert said(server, "pb_utils.unload_model('lab'); say('done')") == ["done"]
        eventually(lambda: server.state("lab") == "UNAVAILABLE")
        server.ask("POST", "/v2/repository/models/lab/load")
        assert said(server, "pb_utils.load_model('lab'); say('again')") == ["again"]
        assert said(server, "say('once more')") == ["once more"]


LOADING = """
def initialize(self, args):
    other = {"first": "second", "second": "first", "itself": "itself"}[args["model_name"]]
    try:
        pb_utils.load_model(other)
    except pb_utils.TritonModelException as error:
        print(args["model_name"], "says:", error, flush=True)

def execute(self, requests):
    return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_loads_that_would_wait_for_each_other(tmp_path: Path) -> None:
    for name in ("first", "second", "itself"):
        python_model(tmp_path / "models", name, LOADING)
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        for name in ("first", "itself"):
            assert server.ask("POST", f"/v2/repository/models/{name}/load")[0] == 200
        assert "itself says: Failed to load model: " in server.text
        assert "model 'itself' is being loaded, and that waits for this call" in server.text
        assert "model 'first' is being loaded, and that waits for this call" in server.text
        assert server.ready("first")
        assert server.ready("second")


CHAIN = """
def initialize(self, args):
    number = int(args["model_name"].removeprefix("chain"))
    if number < 5:
        pb_utils.load_model(f"chain{number + 1}")

def execute(self, requests):
    return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_more_loads_wait_for_each_other_than_may_be_under_way(tmp_path: Path) -> None:
    for number in range(6):
        python_model(tmp_path / "models", f"chain{number}", CHAIN)
    flags = ("--model-control-mode=explicit", "--model-load-thread-count=1")
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        assert server.ask("POST", "/v2/repository/models/chain0/load")[0] == 200
        assert all(server.ready(f"chain{number}") for number in range(6))


def test_a_called_model_is_unloaded_under_the_caller(tmp_path: Path) -> None:
    models = laboratory(tmp_path / "models")
    program = """
wrong = 0
for number in range(400):
    response = ask(value=[number]).exec()
    if response.has_error():
        wrong += 1
        assert "is not ready" in response.error().message(), response.error().message()
    else:
        assert response.output_tensors()[0].as_numpy()[0, 0] == number
say("fine")
"""
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with serving(models, tmp_path / "log", *flags) as server, ThreadPoolExecutor(1) as threads:
        calling = threads.submit(said, server, program)
        while not calling.done():
            server.ask("POST", "/v2/repository/models/echo/unload")
            server.ask("POST", "/v2/repository/models/echo/load")
        assert calling.result() == ["fine"]
