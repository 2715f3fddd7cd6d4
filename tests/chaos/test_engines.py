"""Engines that die, hang or are left: who is told, what comes back, and that nothing is held or counted wrongly."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import h2.connection
import h2.events
import pytest

from llm_models import CONTEXT, language_model
from nerite.wire.grpc_service import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from process_family import lives, processes_of
from serving import Serving, eventually, serving

CUTS = int(os.environ.get("NERITE_TEST_CUTS", "250"))
"""Streams that are cut."""
DEATH = "The worker died while it ran this request: "
STEP_TIMEOUT = 3
CHAT = f"""
backend: "llm"
parameters [
  {{ key: "MAX_NUM_SEQS" value {{ string_value: "16" }} }},
  {{ key: "STEP_TIMEOUT_SECONDS" value {{ string_value: "{STEP_TIMEOUT}" }} }}
]
"""
NARROW = CHAT.replace('"16"', '"1"')
SINGLE = CHAT + "model_transaction_policy { decoupled: false }\n"
ENDLESS = {"max_tokens": CONTEXT - 10, "temperature": 0, "ignore_eos": True}
FEW = {**ENDLESS, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("engines")
    models = folder / "models"
    for name, config in (("chat", CHAT), ("single", SINGLE), ("narrow", NARROW)):
        (models / name).mkdir(parents=True)
        language_model(models / name / "1")
        (models / name / "config.pbtxt").write_text(config)
    with serving(models, folder / "log") as running:
        yield running
    assert "Traceback" not in running.text


class Metrics:
    """The figures of language models, of all of them together."""

    def __init__(self, server: Serving) -> None:
        self._samples = server.metrics()

    def __call__(self, name: str, **labels: str) -> float:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for sample, value in self._samples.items()
            if sample.partition("{")[0] == name and all(each in sample for each in wanted)
        )


def at_rest(server: Serving) -> bool:
    """Whether nothing runs, waits or holds memory, as the metrics have it."""
    told = Metrics(server)
    gauges = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "nerite_llm_requests",
        "vllm:kv_cache_usage_perc",
    )
    assert told("nerite_llm_kv_blocks", state="free") > 0
    return not told("nerite_llm_kv_blocks", state="used") and not any(map(told, gauges))


def ended(server: Serving, **labels: str) -> float:
    return Metrics(server)("vllm:request_success_total", **labels)


class Api(NamedTuple):
    """A way to ask over HTTP."""

    path: str
    body: Callable[[Any], Any]
    """With these sampling parameters."""
    status: int
    """Of a request whose engine goes: what streams has its status, and generate has no other, as with Triton."""


PROMPT = "once"
CHAT_SO_FAR = [{"role": "user", "content": PROMPT}]
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
OVER_HTTP = (
    Api("/v2/models/chat/generate", lambda said: {"text_input": PROMPT, "parameters": said}, 400),
    Api(
        "/v2/models/chat/generate_stream", lambda said: {"text_input": PROMPT, "stream": True, "parameters": said}, 200
    ),
    Api("/v2/models/single/infer", lambda said: {"inputs": [TENSOR], "parameters": said}, 500),
    Api("/v1/completions", lambda said: {"model": "chat", "prompt": PROMPT, **said}, 500),
    Api("/v1/completions", lambda said: {"model": "chat", "prompt": PROMPT, "stream": True, **said}, 200),
    Api("/v1/chat/completions", lambda said: {"model": "chat", "messages": CHAT_SO_FAR, "stream": True, **said}, 200),
)
GENERATE, _, INFER, *_ = OVER_HTTP
OVER_GRPC = ("chat", "single")
"""Models, of which the first is asked on a stream and the other by single calls."""


def ask(server: Serving, api: Api, said: Any = FEW) -> tuple[int, str]:
    """Return the status and all that comes."""
    connection = http.client.HTTPConnection(server.http, timeout=40)
    try:
        connection.request("POST", api.path, json.dumps(api.body(said)))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def grpc_request(said: Any, model: str = "chat") -> Any:
    request = ModelInferRequest(model_name=model)
    values = [
        ("text_input", "BYTES", PROMPT.encode()),
        ("sampling_parameters", "BYTES", json.dumps(said).encode()),
        ("stream", "BOOL", None),
    ]
    if model == "single":
        values.pop()
    for name, datatype, value in values:
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        raw = b"\1" if value is None else len(value).to_bytes(4, "little") + value
        request.raw_input_contents.append(raw)
    return request


@contextlib.contextmanager
def streams(server: Serving) -> Iterator[Callable[[Any], Any]]:
    """Give what begins a gRPC stream with one request; a call, for the model that has one answer."""
    with grpc.insecure_channel(server.grpc) as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=ModelStreamInferResponse.FromString,
        )
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=ModelInferResponse.FromString,
        )

        def begin(request: Any) -> Any:
            if request.model_name == "single":
                return call.future(request, timeout=40)
            return stream(iter([request]), timeout=40)

        yield begin


def under_load(server: Serving, disturb: Callable[[], None], cause: str) -> None:
    """Run a request on each API, disturb the engines, and see that each is told why, and that the models come back."""
    before = ended(server, finished_reason="error")
    with streams(server) as begin, ThreadPoolExecutor(len(OVER_HTTP)) as callers:
        stream = begin(grpc_request(ENDLESS))
        answers = [callers.submit(ask, server, api, ENDLESS) for api in OVER_HTTP]
        eventually(lambda: Metrics(server)("nerite_llm_requests") == len(answers) + 1)
        eventually(lambda: Metrics(server)("vllm:num_requests_running") == len(answers) + 1)
        disturb()
        told = [answer.result() for answer in answers]
        told.append((0, "".join(answer.error_message for answer in stream)))
    assert [status for status, _ in told] == [*(api.status for api in OVER_HTTP), 0]
    assert [text.count(DEATH + cause) for _, text in told] == [1] * len(told)
    assert ended(server, finished_reason="error") - before == len(told)
    eventually(lambda: server.ready("chat") and server.ready("single"))
    assert at_rest(server)
    assert {ask(server, GENERATE)[0], ask(server, INFER)[0]} == {200}


def engine_processes(server: Serving) -> tuple[list[int], list[int]]:
    """Return the workers of the engines that are under load, and the processes that step their pipelines."""
    found = server.workers()
    workers = [found[name] for name in ("chat_0", "single_0") if name in found]
    return workers, [pid for worker in workers for pid in processes_of(worker)]


def test_an_engine_that_is_killed_under_load(server: Serving) -> None:
    workers, pipelines = engine_processes(server)
    assert len(pipelines) == 2

    def kill() -> None:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not server.ready("chat"))

    under_load(server, kill, "it was ended by SIGKILL")
    eventually(lambda: not any(map(lives, pipelines)))


@pytest.mark.parametrize("which", [0, 1], ids=["worker", "pipeline"])
def test_an_engine_that_hangs_under_load(server: Serving, which: int) -> None:
    processes = engine_processes(server)

    def stop() -> None:
        for pid in processes[which]:
            os.kill(pid, signal.SIGSTOP)

    under_load(server, stop, f"its engine has finished no step for {STEP_TIMEOUT} s, and it was killed")
    eventually(lambda: not any(map(lives, [*processes[0], *processes[1]])))


@pytest.mark.parametrize("which", [0, 1], ids=["worker", "pipeline"])
def test_an_engine_that_stands_still_for_a_moment(server: Serving, which: int) -> None:
    """Shorter than it may: nothing is lost."""
    before = engine_processes(server)
    with ThreadPoolExecutor(len(OVER_HTTP)) as callers:
        answers = [callers.submit(ask, server, api, ENDLESS | {"max_tokens": 2_000}) for api in OVER_HTTP]
        eventually(lambda: Metrics(server)("vllm:num_requests_running") > 0)
        for pid in before[which]:
            os.kill(pid, signal.SIGSTOP)
        assert server.ask("GET", "/v2/health/live")[0] == 200
        assert server.ready("chat"), "it is at work"
        time.sleep(STEP_TIMEOUT / 6)
        for pid in before[which]:
            os.kill(pid, signal.SIGCONT)
        assert [answer.result()[0] for answer in answers] == [200] * len(answers)
    assert engine_processes(server) == before
    assert at_rest(server)


@pytest.mark.parametrize("which", [0, 1], ids=["worker", "pipeline"])
def test_an_engine_that_is_killed_at_rest(server: Serving, which: int) -> None:
    before = engine_processes(server)
    for pid in before[which]:
        os.kill(pid, signal.SIGKILL)

    def others() -> bool:
        now = engine_processes(server)[which]
        return len(now) == 2 and not set(now) & set(before[which])

    eventually(others)
    eventually(lambda: server.ready("chat") and server.ready("single"))
    assert {ask(server, GENERATE)[0], ask(server, INFER)[0]} == {200}
    eventually(lambda: not any(map(lives, before[which])))


def test_a_pipeline_that_is_killed_under_load(server: Serving) -> None:
    """The worker has another one, and fails what ran."""
    workers, pipelines = engine_processes(server)
    with ThreadPoolExecutor(len(OVER_HTTP)) as callers:
        answers = [callers.submit(ask, server, api, ENDLESS) for api in OVER_HTTP]
        eventually(lambda: Metrics(server)("vllm:num_requests_running") == len(answers))
        for pid in pipelines:
            os.kill(pid, signal.SIGKILL)
        for answer in answers:
            assert (
                "The engine failed while it ran this request: its process was ended by signal 9" in answer.result()[1]
            )
    eventually(lambda: server.ready("chat") and server.ready("single"))
    assert {ask(server, GENERATE)[0], ask(server, INFER)[0]} == {200}
    assert engine_processes(server)[0] == workers
    assert at_rest(server)


def test_those_that_wait_survive_the_death_of_the_engine(server: Serving) -> None:
    narrow = Api("/v2/models/narrow/generate", lambda said: {"text_input": PROMPT, "parameters": said}, 400)
    with ThreadPoolExecutor(5) as callers:
        runs = callers.submit(ask, server, narrow, ENDLESS)
        eventually(lambda: Metrics(server)("vllm:num_requests_running", model="narrow") == 1)
        wait = [callers.submit(ask, server, narrow) for _ in range(4)]
        eventually(lambda: Metrics(server)("nv_inference_pending_request_count", model="narrow") == len(wait))
        os.kill(server.workers()["narrow_0"], signal.SIGKILL)
        status, text = runs.result()
        assert (status, DEATH in text) == (narrow.status, True)
        assert {each.result()[0] for each in wait} == {200}


def test_an_engine_that_rests_does_not_hang(server: Serving) -> None:
    pid = server.workers()["chat_0"]
    assert ask(server, GENERATE)[0] == 200
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STEP_TIMEOUT + 0.5)
    os.kill(pid, signal.SIGCONT)
    assert ask(server, GENERATE)[0] == 200
    assert server.workers()["chat_0"] == pid


@pytest.mark.parametrize(
    ("said", "prompt", "text"),
    [
        (FEW, "x" * CONTEXT, f"the prompt has {CONTEXT} tokens, but the model's context is {CONTEXT}"),
        (FEW, "", "the prompt is empty"),
        ({**FEW, "logit_bias": {"5": 1e30}}, "once", "logit_bias"),
        ({**FEW, "structured_outputs": {"json": "{"}}, "once", "structured"),
        ({**FEW, "top_p": -1}, "once", "top_p"),
    ],
)
def test_poison_harms_nobody_else(server: Serving, said: Any, prompt: str, text: str) -> None:
    body = {"text_input": prompt, "sampling_parameters": json.dumps(said)}
    with streams(server) as begin:
        neighbour = begin(grpc_request(ENDLESS))
        next(neighbour)
        status, _, answer = server.ask("POST", "/v2/models/chat/generate", body)
        assert (status, text in answer.decode()) == (400, True)
        for _ in range(20):
            assert not next(neighbour).error_message
        neighbour.cancel()
    eventually(lambda: at_rest(server))


def test_streams_that_are_cut_at_any_moment_leave_nothing(server: Serving) -> None:
    """Every token that was generated is counted once, and is one of a request that is over."""
    before = Metrics(server)
    chance = random.Random(7)
    apis = (*OVER_HTTP, *OVER_GRPC)
    plans = [(chance.choice(apis), chance.randrange(1, 200), chance.random() ** 2 / 2) for _ in range(CUTS)]
    with streams(server) as begin, ThreadPoolExecutor(24) as callers:
        list(callers.map(lambda plan: cut(server, begin, *plan), plans))
    # The last ones may be still on their way in, and are behind nobody who comes now.
    for api in (GENERATE, INFER):
        assert ask(server, api)[0] == 200
    eventually(lambda: at_rest(server), 30)
    after = Metrics(server)

    def more(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    tokens = more("vllm:generation_tokens_total")
    assert tokens == more("vllm:request_generation_tokens_sum") > 0
    assert more("vllm:prompt_tokens_total") == more("vllm:request_prompt_tokens_sum")
    over = more("vllm:request_success_total") - 2
    cut_off = more("vllm:request_success_total", finished_reason="abort")
    assert 0 < cut_off < over <= CUTS
    assert over == cut_off + more("vllm:request_success_total", finished_reason="length") - 2
    assert 0 < more("nerite_llm_wasted_tokens_total", reason="abort") < tokens


def test_who_does_not_read_holds_nobody_up_and_loses_nothing(server: Serving) -> None:
    """What the engine says in the meantime comes in few messages, once there is room for them."""
    tokens = 3_000
    request = grpc_request({**FEW, "max_tokens": tokens})
    request.id = "x" * 1_000  # which each message repeats: a megabyte may wait
    request.inputs.add(name="return_num_output_tokens", datatype="BOOL", shape=[1])
    request.raw_input_contents.append(b"\1")
    message = request.SerializeToString()
    before = ended(server, finished_reason="length")
    client = h2.connection.H2Connection()
    client.initiate_connection()
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    client.send_headers(1, [*fields.items(), ("content-type", "application/grpc"), ("te", "trailers")])
    client.send_data(1, b"\0" + len(message).to_bytes(4) + message, end_stream=True)
    host, port = server.grpc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        line.sendall(client.data_to_send())
        assert ask(server, GENERATE)[0] == 200
        eventually(lambda: ended(server, finished_reason="length") - before == 2, 30)
        for stream in (None, 1):
            client.increment_flow_control_window(2**30, stream)
        line.sendall(client.data_to_send())
        answers = b""
        over = False
        while not over:
            for event in client.receive_data(line.recv(65536)):
                answers += event.data if isinstance(event, h2.events.DataReceived) else b""
                over = over or isinstance(event, h2.events.StreamEnded)
            line.sendall(client.data_to_send())
    counts = []
    while answers:
        size = int.from_bytes(answers[1:5])
        told = ModelStreamInferResponse.FromString(answers[5 : 5 + size])
        answers = answers[5 + size :]
        assert not told.error_message
        for output, raw in zip(told.infer_response.outputs, told.infer_response.raw_output_contents, strict=True):
            if output.name == "num_output_tokens":
                counts.append(int.from_bytes(raw, "little"))
    assert sum(counts) == tokens
    assert len(counts) < tokens / 2
    eventually(lambda: at_rest(server))


def cut(server: Serving, begin: Callable[[Any], Any], api: Api | str, most: int, patience: float) -> None:
    """Begin a request, over gRPC to a model if that is given, read for a while what comes, and go without a word."""
    said = {**FEW, "max_tokens": most}
    if isinstance(api, str):
        call = begin(grpc_request(said, api))
        time.sleep(patience)
        call.cancel()
        return
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        raw = json.dumps(api.body(said)).encode()
        client.sendall(
            f"POST {api.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        )
        client.settimeout(0.001)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                client.recv(4096)
