"""Our side of vLLM, on a stand-in for it: what is told to whom, and what comes of mistakes, aborts and its death.

The real one is in tests/service/test_llm_vllm.py, where it is installed.
"""

from __future__ import annotations

import io
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import PIL.Image
import pytest

import llm_listening
from llm_listening import Heard, eventually
from nerite.backends.interface import ModelContext
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError, NotFound, Unavailable, Unsupported
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import NOBODY, Caller, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.llm import backend
from nerite.llm.backend import LlmInstance
from nerite.llm.engine import EngineStats, FinishReason, SleepingEngine
from nerite.llm.sampling_parameters import SamplingParameters
from nerite.llm.streaming import StepReport
from nerite.llm.vllm import VllmEngine, framework
from nerite.llm.vllm.framework import VllmArguments
from pages import ROOT
from process_family import lives

FEW = SamplingParameters(max_tokens=4)
ENDLESS = SamplingParameters(max_tokens=None)
REFUSED, DEADLY = 8, 9


class Server:
    """Hears what the engine says of itself."""

    def __init__(self) -> None:
        self.stats: list[EngineStats] = []
        self.given_up: queue.SimpleQueue[str] = queue.SimpleQueue()


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_ins" / "vllm"))
    # It sets them, too; so they are as they were afterwards.
    for name, value in framework.VARIABLES.items():
        monkeypatch.setenv(name, value)
    # It makes a group of this process and its children, which is pytest's business.
    monkeypatch.setattr(framework, "end_children_with_us", lambda: None)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def started(server: Server) -> Iterator[Callable[..., VllmEngine]]:
    engines = []

    def start(adapters: dict[str, str] | None = None, **given: Any) -> VllmEngine:
        engine = VllmEngine(VllmArguments("m", {"model": "m", **given}, adapters or {}))
        engine.start(server.stats.append, server.given_up.put)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


Started = Callable[..., VllmEngine]


def asked(
    engine: VllmEngine, sampling: SamplingParameters = FEW, id: str = "a", prompt: Any = "once", **more: Any
) -> Heard:
    return llm_listening.asked(engine, sampling, prompt, id, **more)


def picture() -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (4, 4)).save(file, "PNG")
    return file.getvalue()


def test_a_delta_for_each_step(started: Started, server: Server) -> None:
    engine = started()
    told = len(server.stats)
    heard = asked(engine).over()
    assert (heard.prompt_tokens, heard.text()) == (5, "abcd")
    assert [delta.finish_reason for delta in heard.deltas] == [None, None, None, FinishReason.LENGTH]
    assert len(server.stats) - told == 4
    last = server.stats[-1]
    assert (last.running, last.free_blocks, last.total_blocks, last.context_length) == (0, 64, 64, 100)
    assert (last.prompt_tokens, last.generated_tokens, last.prefix_hits) == (5, 4, (last.prefix_queries or 0) // 2)
    assert asked(engine, special_tokens=False).over().prompt_tokens == 4


def test_capabilities(started: Started) -> None:
    able = started({"A": "somewhere"}, scheduling_policy="priority").capabilities()
    assert (able.engine, able.context_length, able.max_sequences, able.top_logprobs) == ("vllm", 100, 4, 20)
    assert (able.adapters, able.priorities) == ({"A"}, True)
    assert able.grammars == {"json_schema", "regex", "ebnf"}


def test_adapters_that_come_and_go(started: Started) -> None:
    engine = started({"A": "somewhere"}, enable_lora=True)
    engine.load_adapter("B", "elsewhere")
    assert engine.capabilities().adapters == {"A", "B"}
    assert asked(engine, replace(FEW, max_tokens=2), lora="B").over().text() == "BB"
    with pytest.raises(InvalidArgument, match="'B' has already been loaded"):
        engine.load_adapter("B", "elsewhere")
    with pytest.raises(NeriteError, match="no adapter there"):
        engine.load_adapter("C", "nowhere")
    running = asked(engine, ENDLESS, "endless", lora="B")
    running.begun()
    engine.unload_adapter("B")
    assert engine.capabilities().adapters == {"A"}
    with pytest.raises(Unsupported, match="LoRA B is not supported"):
        asked(engine, FEW, "late", lora="B")
    engine.abort("endless")
    assert running.over().text().startswith("B")
    with pytest.raises(NotFound, match="'B' cannot be found"):
        engine.unload_adapter("B")


def test_adapters_need_an_engine_with_room_for_them(started: Started) -> None:
    with pytest.raises(Unsupported, match=r'add "enable_lora": true to its model\.json'):
        started().load_adapter("B", "elsewhere")


def test_it_sleeps_and_wakes(started: Started) -> None:
    engine = started(enable_sleep_mode=True)
    assert engine.capabilities().sleeps
    assert isinstance(engine, SleepingEngine)
    assert asked(engine).over().text() == "abcd"
    engine.sleep()
    engine.wake()
    assert asked(engine, id="b").over().text() == "abcd"


def test_sleep_has_to_be_enabled_and_may_fail(started: Started) -> None:
    engine = started()
    assert not engine.capabilities().sleeps
    with pytest.raises(Unsupported, match="enable_sleep_mode"):
        engine.sleep()
    engine = started(enable_sleep_mode=True, wakes=False)
    engine.sleep()
    with pytest.raises(NeriteError, match="vllm error in waking up: CUDA out of memory"):
        engine.wake()


def test_sequences_probabilities_and_adapters(started: Started) -> None:
    engine = started({"A": "somewhere"})
    heard = asked(engine, replace(FEW, n=2, logprobs=1), lora="A").over()
    assert heard.text(0) == heard.text(1) == "AAAA"
    first = heard.deltas[0].logprobs[0]
    assert (first.token, first.logprob, first.rank, first.text) == (0, -0.5, 1, "A")
    assert [(other.token, other.rank) for other in first.others] == [(99, 2)]


def test_several_run_and_are_aborted(started: Started, server: Server) -> None:
    engine = started()
    running = [asked(engine, ENDLESS, id).begun() for id in "abc"]
    eventually(lambda: engine.stats().running == 3)
    assert asked(engine, id="d").over().text() == "abcd"
    for id in "abc":
        engine.abort(id)
    for heard in running:
        assert heard.over().deltas[-1].finish_reason is FinishReason.ABORT
    eventually(lambda: server.stats[-1].running == 0)
    assert engine.is_healthy()


def test_a_prompt_is_cut(started: Started) -> None:
    engine = started()
    assert asked(engine, replace(FEW, truncate_prompt_tokens=2), prompt="x" * 200).over().prompt_tokens == 2
    assert asked(engine, replace(FEW, truncate_prompt_tokens=-1), prompt="x" * 200).over().prompt_tokens == 96


def test_the_salt_of_a_prompt(started: Started) -> None:
    prompts: list[Any] = []
    engine = started(most_images=2, prompts=prompts)
    for images in ([], [picture()]):
        for salt in ("", "acme"):
            asked(engine, images=images, cache_salt=salt).over()
    salts = [prompt.get("cache_salt") for prompt in prompts[1:]]  # the first warms up
    assert salts == [None, "acme", None, "acme"]


class Reporter:
    """Hears of nothing that matters here."""

    def report(self, report: object) -> None:
        pass

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


class Answers:
    """Takes the last response to each request: its error, or None."""

    def __init__(self) -> None:
        self.taken: list[str | None] = []

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        if final:
            self.taken.append(None if response.error is None else response.error.message)


def test_requests_without_images_do_not_wait_for_those_that_are_decoded(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[Any] = []
    engine = started(most_images=2, prompts=prompts)
    go = threading.Event()

    def decoded(files: Sequence[bytes]) -> tuple[Any, ...]:
        if files:
            assert go.wait(60)
            raise InvalidArgument("'image' 0 cannot be read")
        return ()

    monkeypatch.setattr(backend, "pixels", decoded)
    config: dict[str, Any] = {"output": [{"name": "text_output"}]}
    instance = LlmInstance(ModelContext("m", 1, ROOT, config), "m_0", engine, StepReport(Reporter(), 0))  # type: ignore[arg-type]
    answers = Answers()

    def ask(**inputs: bytes) -> InferenceRequest:
        header = RequestHeader("m", "", [TensorSpec(name, dtypes.BYTES, (1,)) for name in inputs])
        request = InferenceRequest(header, [join_bytes([value]) for value in inputs.values()], answers, 0)
        assert instance.execute([request], timings=ExecutionTimes()) == [None]
        return request

    for _ in range(4):
        cancelled = ask(text_input=b"once", image=b"")
    cancelled.cancel()
    ask(text_input=b"once")
    eventually(lambda: len(prompts) == 2)  # the first warms up
    assert answers.taken == []
    go.set()
    eventually(lambda: len(answers.taken) == 4)
    wrong = "Error generating stream: 'image' 0 cannot be read"
    assert sorted(map(str, answers.taken)) == [wrong] * 3 + ["Request was cancelled"]
    instance.close()


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (None, [None, "acme", "other", "\0003", "\0004"]),
        ("false", [None, "acme", "other", "\0003", "\0004"]),
        ("true", [None] * 5),
    ],
)
def test_tenants_have_salts_of_their_own(started: Started, parameter: str | None, expected: list[str | None]) -> None:
    prompts: list[Any] = []
    engine = started(prompts=prompts)
    config: dict[str, Any] = {"output": [{"name": "text_output"}]}
    if parameter is not None:
        config["parameters"] = {"TENANTS_SHARE_CACHE": {"string_value": parameter}}
    step = StepReport(Reporter(), 0)  # type: ignore[arg-type]  # as much of one as is needed
    instance = LlmInstance(ModelContext("m", 1, ROOT, config), "m_0", engine, step)
    for tenant in (None, "acme", "other", "", ""):  # the last two are of several tenants
        header = RequestHeader(
            "m", "", [TensorSpec("text_input", dtypes.BYTES, (1,))], caller=None if tenant is None else Caller(tenant)
        )
        request = InferenceRequest(header, [join_bytes([b"once"])], NOBODY, 0)
        assert instance.execute([request], timings=ExecutionTimes()) == [None]
    eventually(lambda: len(prompts) == 6)
    assert [prompt.get("cache_salt") for prompt in prompts[1:]] == expected


def test_images_count(started: Started) -> None:
    engine = started(most_images=2)
    heard = asked(engine, images=[picture()] * 2).over()
    assert (heard.prompt_tokens, heard.text_tokens, heard.text()) == (5 + 4, 5, "abcd")
    with pytest.raises(InvalidArgument, match="'image' 0 is not in one of the formats JPEG"):
        asked(engine, images=[b"hi"])
    with pytest.raises(Unsupported, match="a prompt with images cannot be truncated"):
        asked(engine, replace(FEW, truncate_prompt_tokens=2), images=[picture()])


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (
            {"prompt": "x" * 99},
            InvalidArgument,
            "the prompt has 100 tokens, but the model's context is 100: remove",
        ),
        ({"prompt": "", "special_tokens": False}, InvalidArgument, "the prompt is empty"),
        ({"lora": "C"}, Unsupported, "LoRA feature is not enabled"),
        ({"sampling": replace(FEW, logprobs=21)}, Unsupported, "'logprobs' is 21"),
        (
            {"sampling": replace(FEW, top_k=2000)},
            InvalidArgument,
            "vllm error in reading sampling parameters: top_k is",
        ),
        (
            {"prompt": [1, REFUSED]},
            InvalidArgument,
            "vllm error in starting a request: a token that is none",
        ),
    ],
)
def test_what_is_refused(started: Started, said: dict[str, Any], kind: type[NeriteError], text: str) -> None:
    engine = started()
    with pytest.raises(kind, match=text):
        asked(engine, **said).over()
    assert asked(engine).over().text() == "abcd"


def test_its_death(started: Started, server: Server) -> None:
    engine = started()
    running = asked(engine, ENDLESS).begun()
    deadly = asked(engine, id="b", prompt=[DEADLY])
    for heard in (running, deadly):
        with pytest.raises(Unavailable, match="vllm error in a step of the engine: it has died"):
            heard.over()
    assert "vLLM has failed" in server.given_up.get(timeout=20)
    assert not engine.is_healthy()
    assert server.stats[-1].running == 0
    with pytest.raises(Unavailable, match="the engine is not running"):
        asked(engine)


@pytest.mark.parametrize(
    ("given", "adapters", "text"),
    [
        ({"max_model_length": 5}, {}, r"'max_model_length' is not an argument of vLLM\. Did you mean max_model_len\?"),
        ({"tasks": ("embed",)}, {}, "the model generates no text: vLLM supports embed for it"),
        ({}, {"A": "nowhere"}, "vllm error in loading model: no adapter there"),
    ],
)
def test_what_cannot_be_loaded(started: Started, given: dict[str, Any], adapters: dict[str, str], text: str) -> None:
    with pytest.raises(NeriteError, match=text):
        started(adapters, **given)


def test_stopping_answers_what_runs(started: Started) -> None:
    engine = started()
    running = asked(engine, ENDLESS).begun()
    engine.stop()
    assert running.over().deltas[-1].finish_reason is FinishReason.ABORT


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Unsupported, match="nerite engines install vllm"):
        VllmEngine(VllmArguments("m", {})).start(server.stats.append, server.given_up.put)


@pytest.mark.parametrize("session", [True, False], ids=["as a worker is", "in a group of others"])
def test_its_processes_end_with_the_worker(session: bool) -> None:
    program = (
        "import subprocess, sys\n"
        "from nerite.llm.vllm import framework\n"
        "framework.end_children_with_us()\n"
        "print(subprocess.Popen(['sleep', '100']).pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=session
    )
    with worker:
        assert worker.stdout is not None
        started = int(worker.stdout.readline())
        assert lives(started)
        worker.kill()
    eventually(lambda: not lives(started))


@dataclass(frozen=True)
class MoreSampling(SamplingParameters):
    """With a parameter that another engine has learned."""

    curiosity: int = 0


def test_what_it_was_not_taught_is_refused_and_not_left_out(started: Started) -> None:
    engine = started()
    with pytest.raises(Unsupported, match="'curiosity' is not supported by the engine vllm: remove it"):
        asked(engine, MoreSampling(max_tokens=4, curiosity=1))
    assert asked(engine, MoreSampling(max_tokens=4)).over().text() == "abcd"
