"""The engine for CPUs, on a real model: what it does in one go, what it refuses, and that nothing poisons it."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_listening import FEW, Heard, asked, eventually, ignored
from llm_models import END, chat_tokens, language_model, write_tokenizer
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import Internal, InvalidArgument, Unavailable, Unsupported
from nerite.llm.backend import LlmBackend
from nerite.llm.engine import EngineStats, FinishReason, tokenizable
from nerite.llm.openvino_genai import OpenVinoGenAiEngine, options
from nerite.llm.openvino_genai.grammars import Grammars
from nerite.llm.openvino_genai.options import PipelineOptions
from nerite.llm.openvino_genai.stepping import AHEAD
from nerite.llm.structured_output import JSON_SCHEMA, Grammar

LONG = replace(FEW, max_tokens=3000)
CONTEXT = 4000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model(tmp_path_factory.mktemp("model") / "1", CONTEXT)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[OpenVinoGenAiEngine]:
    made = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=1024, context_length=CONTEXT))
    made.start(ignored, ignored)
    yield made
    made.stop()


class Steps:
    """What an engine tells of its steps. While ``held``, each waits to be looked at."""

    def __init__(self) -> None:
        self.told: list[EngineStats] = []
        self._turn = threading.Semaphore(0)
        self._seen: queue.SimpleQueue[EngineStats] = queue.SimpleQueue()
        self.held = False

    def __call__(self, stats: EngineStats) -> None:
        self.told.append(stats)
        if self.held:
            self._seen.put(stats)
            assert self._turn.acquire(timeout=20)

    def next(self) -> EngineStats:
        """Return how it is after the step that is held now; the next may begin with ``go_on``."""
        return self._seen.get(timeout=20)

    def go_on(self) -> None:
        self._turn.release()

    def release(self) -> None:
        self.held = False
        self.go_on()


def test_a_delta_for_each_step(engine: OpenVinoGenAiEngine) -> None:
    heard = asked(engine).over()
    assert (heard.prompt_tokens, len(heard.tokens()), heard.reason) == (4, 8, FinishReason.LENGTH)
    assert len(heard.deltas) == 8
    assert asked(engine).over().tokens() == heard.tokens()
    assert asked(engine, prompt=[80, 79, 68, 70]).over().prompt_tokens == 4


@pytest.mark.feature("openvino_genai", "seeds")
def test_seeds(engine: OpenVinoGenAiEngine) -> None:
    seeded = replace(FEW, temperature=1.5, seed=3)
    first = asked(engine, seeded).over().tokens()
    assert asked(engine, seeded).over().tokens() == first
    assert asked(engine, replace(seeded, seed=4)).over().tokens() != first
    # Without one, each request is another.
    assert len({tuple(asked(engine, replace(seeded, seed=None)).over().tokens()) for _ in range(4)}) > 1


@pytest.mark.feature("openvino_genai", "several sequences of a prompt (`n`)")
def test_several_sequences(engine: OpenVinoGenAiEngine) -> None:
    heard = asked(engine, replace(FEW, n=3, temperature=1.5, seed=3)).over()
    assert [len(heard.tokens(index)) for index in range(3)] == [8, 8, 8]
    assert len({heard.text(index) for index in range(3)}) > 1


@pytest.mark.feature("openvino_genai", "stop strings and tokens")
@pytest.mark.feature("openvino_genai", "fewest and most tokens (`min_tokens`, `max_tokens`)")
def test_what_ends_a_sequence(engine: OpenVinoGenAiEngine) -> None:
    whole = asked(engine).over()
    third = whole.tokens()[2]
    by_token = asked(engine, replace(FEW, stop_token_ids=(third,))).over()
    assert by_token.reason is FinishReason.STOP
    assert by_token.tokens()[-1] == third
    assert len(asked(engine, replace(FEW, stop_token_ids=(third,), min_tokens=8)).over().tokens()) == 8
    letter = next(character for character in whole.text() if character.isascii())
    by_text = asked(engine, replace(FEW, stop=(letter,))).over()
    assert (by_text.reason, by_text.text()) == (FinishReason.STOP, whole.text().partition(letter)[0])
    assert END not in whole.tokens()


@pytest.mark.feature("openvino_genai", "penalties")
def test_penalties(engine: OpenVinoGenAiEngine) -> None:
    many = replace(FEW, max_tokens=60)
    plain = asked(engine, many).over().tokens()
    for penalty in ({"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert len(set(asked(engine, replace(many, **penalty)).over().tokens())) > len(set(plain))


@pytest.mark.feature("openvino_genai", "prompts cut to length (`truncate_prompt_tokens`)")
def test_prompts_that_are_cut(engine: OpenVinoGenAiEngine) -> None:
    expected = asked(engine, FEW, "once").over()
    cut = asked(engine, replace(FEW, truncate_prompt_tokens=4), "not all of it, but once").over()
    assert (cut.prompt_tokens, cut.tokens()) == (4, expected.tokens())
    assert asked(engine, replace(FEW, truncate_prompt_tokens=9), "once").over().prompt_tokens == 4
    most = asked(engine, replace(FEW, truncate_prompt_tokens=-1), "x" * 5000).over()
    assert most.prompt_tokens == CONTEXT - 8


def test_a_prompt_that_is_too_long_whatever_its_tokens_are(engine: OpenVinoGenAiEngine) -> None:
    with pytest.raises(
        InvalidArgument, match="the prompt has 5000000 characters, which do not fit into a context of 4000 tokens"
    ):
        asked(engine, prompt="x" * 5_000_000)
    cut = asked(engine, replace(FEW, truncate_prompt_tokens=3), prompt="x" * 5_000_000 + "abc").over()
    assert cut.tokens() == asked(engine, prompt="abc").over().tokens()


def test_a_long_prompt_is_tokenized_as_far_as_it_may_fit() -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return len(text)  # a token for each character

    fits = "x" * 90_000
    assert tokenizable(fits, None, 100_000, count) is fits and not counted
    with pytest.raises(InvalidArgument, match="the first 131072 of 1500000 characters of the prompt do not fit"):
        tokenizable("x" * 1_500_000, None, 100_000, count)
    assert counted == [65_536, 65_536]
    with pytest.raises(InvalidArgument, match="the prompt has 1600001 characters, which do not fit"):
        tokenizable("x" * 1_600_001, None, 100_000, count)
    words = " " * 1_500_000
    assert tokenizable(words, None, 100_000, lambda text: len(text) // 16) is words
    assert len(tokenizable("x" * 30_000_000, 100_000, 100_000, count)) == 1_600_000
    assert len(tokenizable("x" * 30_000_000, 3, 100_000, count)) == 1024


def test_special_tokens_are_added_once(tmp_path: Path) -> None:
    """What a chat template has rendered has the tokens that Hugging Face has for it."""
    directory = language_model(tmp_path / "1")
    write_tokenizer(directory, begin=True)
    rendered, tokens = "<s>[user]once</s>", chat_tokens([{"role": "user", "content": "once"}])
    engine = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=64, context_length=CONTEXT))
    engine.start(ignored, ignored)
    expected = asked(engine, prompt=tokens).over()
    told = asked(engine, prompt=rendered, special_tokens=False).over()
    twice = asked(engine, prompt=rendered).over()
    engine.stop()
    assert (told.prompt_tokens, told.tokens()) == (len(tokens), expected.tokens())
    assert (twice.prompt_tokens, tokens.count(0)) == (len(tokens) + 1, 1)
    assert twice.tokens() != told.tokens()


@pytest.mark.feature("openvino_genai", "probability of the chosen token")
def test_log_probabilities(engine: OpenVinoGenAiEngine) -> None:
    heard = asked(engine, replace(FEW, logprobs=0)).over()
    told = [each for delta in heard.deltas for each in delta.logprobs]
    assert [each.token for each in told] == heard.tokens()
    assert all(each.logprob < 0 for each in told)


@pytest.mark.feature("openvino_genai", "continuous batching")
@pytest.mark.feature("openvino_genai", "cancellation")
def test_many_run_at_once_and_leave_nothing(engine: OpenVinoGenAiEngine) -> None:
    alone = asked(engine).over().tokens()
    before = engine.stats()
    many = [asked(engine, LONG, id=str(number)).begun() for number in range(8)]
    eventually(lambda: engine.stats().running == 8)
    busy = engine.stats()
    assert busy.waiting == 0
    assert (busy.total_blocks, busy.block_size) == (1024, 32)
    assert busy.free_blocks <= 1024 - 8
    # One that comes joins them, and is done before they are.
    assert asked(engine, id="late").over().tokens() == alone
    assert engine.stats().running == 8
    for number in range(8):
        engine.abort(str(number))
    assert {heard.over().reason for heard in many} == {FinishReason.ABORT}
    after = engine.stats()
    assert (after.running, after.waiting, after.failures) == (0, 0, 0)
    eventually(lambda: engine.stats().free_blocks == 1024)
    assert after.prompt_tokens - before.prompt_tokens == 9 * 4


def test_what_it_tells_of_each_step(directory: Path) -> None:
    steps = Steps()
    engine = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=256))
    engine.start(steps, ignored)
    try:
        (idle,) = steps.told
        assert (idle.running, idle.waiting, idle.total_blocks, idle.free_blocks) == (0, 0, 256, 256)
        steps.held = True
        long = asked(engine, LONG, prompt="x" * 200, id="long")
        short = asked(engine, LONG, id="short")
        busy = steps.next()
        while busy.running < 2:
            steps.go_on()
            busy = steps.next()
        assert busy.prompt_tokens == 204
        assert busy.free_blocks == 256 - 8
        # Steps that began before the abort arrived still have it, and the pipeline counts before it steps.
        engine.abort("long")
        left = busy
        for _ in range(AHEAD + 8):
            steps.go_on()
            left = steps.next()
            if left.free_blocks == 255:
                break
        assert (left.running, left.free_blocks) == (1, 255)
        assert long.over().reason is FinishReason.ABORT
        engine.abort("short")
        steps.release()
        short.over()
        eventually(lambda: steps.told[-1].free_blocks == 256)
        assert (steps.told[-1].running, steps.told[-1].waiting) == (0, 0)
    finally:
        steps.release()
        engine.stop()


@pytest.mark.feature("openvino_genai", "long prompts in several steps (chunked prefill)")
def test_who_runs_goes_on_while_a_long_prompt_is_read(directory: Path) -> None:
    engine = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=256, batched_tokens=64))
    engine.start(ignored, ignored)
    try:
        neighbour = asked(engine, LONG, id="neighbour").begun()
        before = len(neighbour.deltas)
        asked(engine, prompt="x" * 1200, id="long").begun()
        assert len(neighbour.deltas) - before >= 1200 // 64
    finally:
        engine.stop()


@pytest.mark.feature("openvino_genai", "beginnings that prompts share are computed once (prefix caching)")
@pytest.mark.parametrize("caching", [True, False])
def test_what_was_computed_before(directory: Path, caching: bool) -> None:
    """It is not told, but it takes fewer steps."""
    steps = Steps()
    chosen = PipelineOptions("m", directory, cache_blocks=256, batched_tokens=64, prefix_caching=caching)
    engine = OpenVinoGenAiEngine(chosen)
    engine.start(steps, ignored)
    try:
        taken = []
        for end in ("one", "one", "two"):
            before = len(steps.told)
            asked(engine, prompt="x" * 1200 + end, id=end).over()
            eventually(lambda: engine.stats().running == 0)
            taken.append(len(steps.told) - before)
    finally:
        engine.stop()
    first, same, other = taken
    assert first >= 1200 // 64
    assert (max(same, other) < first // 2) is caching


def test_more_than_the_batch_holds_wait(directory: Path) -> None:
    engine = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=256, max_sequences=2))
    engine.start(ignored, ignored)
    try:
        running = [asked(engine, LONG, id=id).begun() for id in ("a", "b")]
        waiting = asked(engine, id="c")
        eventually(lambda: (engine.stats().running, engine.stats().waiting) == (2, 1))
        engine.abort("a")
        assert waiting.over().reason is FinishReason.LENGTH
        with pytest.raises(Unsupported, match="'n' is 3, but the engine runs at most 2 sequences"):
            asked(engine, replace(FEW, n=3))
    finally:
        engine.stop()
    # What still ran is answered.
    assert running[1].over().reason is FinishReason.ABORT
    with pytest.raises(Unavailable):
        asked(engine)


def test_the_cache_is_the_context_where_it_is_smaller(engine: OpenVinoGenAiEngine, tmp_path: Path) -> None:
    # What random weights say is another thing on each kind of processor: the end is a token that they do say.
    end = asked(engine).over().tokens()[-1]
    directory = language_model(tmp_path / "1", CONTEXT)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    small = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=8, context_length=CONTEXT))
    small.start(ignored, ignored)
    try:
        assert small.capabilities().context_length == 8 * 32
        # To the brim, past tokens by which the model says that it is done. Two of them have to take turns.
        full = replace(FEW, max_tokens=None)
        both = [asked(small, full, id=id) for id in "ab"]
        assert [len(heard.over().tokens()) for heard in both] == [8 * 32 - 4] * 2
        assert both[0].reason is both[1].reason is FinishReason.LENGTH
        assert end in both[0].tokens()
        assert asked(small, replace(full, ignore_eos=False)).over().tokens()[-1] == end
    finally:
        small.stop()


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        ({"prompt": "x" * CONTEXT}, InvalidArgument, f"the prompt has {CONTEXT} tokens, but the model's context is"),
        ({"prompt": ""}, InvalidArgument, "the prompt is empty"),
        ({"prompt": []}, InvalidArgument, "the prompt is empty"),
        ({"lora": "a"}, Unsupported, "LoRA feature is not enabled"),
        ({"sampling": replace(FEW, logprobs=2)}, Unsupported, "'logprobs' is 2"),
        ({"sampling": replace(FEW, logprobs=1, temperature=1.0)}, Unsupported, "'logprobs' is 1"),
        (
            {"sampling": replace(FEW, logit_bias=((5, 1.0),))},
            Unsupported,
            "'logit_bias' is not supported by the engine",
        ),
        ({"sampling": replace(FEW, bad_words=("x",))}, Unsupported, "'bad_words' is not supported by the engine"),
        (
            {"sampling": replace(FEW, allowed_token_ids=(5,))},
            Unsupported,
            "'allowed_token_ids' is not supported by the",
        ),
    ],
)
def test_what_is_refused(engine: OpenVinoGenAiEngine, said: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        asked(engine, **said)
    assert engine.stats().waiting == 0


def poisoned(engine: OpenVinoGenAiEngine, monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Ask for what the pipeline takes and no step survives: a grammar that nobody has tried."""
    with monkeypatch.context() as context:
        context.setattr(Grammars, "known", lambda *_: True)
        grammar = Grammar(JSON_SCHEMA, json.dumps({"type": "strin"}))
        return asked(engine, replace(FEW, ignore_eos=False), id="poison", grammar=grammar)


def test_a_step_that_fails_fails_what_runs_and_nothing_after_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=256))
    engine.start(ignored, ignored)
    try:
        expected = asked(engine).over().tokens()
        running = [asked(engine, LONG, id=id).begun() for id in ("a", "b")]
        poison = poisoned(engine, monkeypatch)
        for heard in (*running, poison):
            with pytest.raises(Internal, match="The engine failed while it ran this request: openvino error in a step"):
                heard.over()
        assert asked(engine, id="d").over().tokens() == expected
        assert (engine.stats().failures, engine.is_healthy()) == (1, True)
    finally:
        engine.stop()


def test_the_end_of_its_process_fails_what_runs_and_nothing_after_it(directory: Path) -> None:
    engine = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=256, max_sequences=1))
    engine.start(ignored, ignored)
    try:
        expected = asked(engine).over().tokens()
        running = asked(engine, LONG, id="a").begun()
        engine.process.kill()
        # Whether they come before or after it is seen: nothing has begun with them.
        waiting = [asked(engine, id=id) for id in ("b", "c")]
        with pytest.raises(Internal, match="while it ran this request: its process was ended by signal 9"):
            running.over()
        assert [heard.over().tokens() for heard in waiting] == [expected] * 2
        assert (engine.stats().failures, engine.is_ready()) == (1, True)
    finally:
        engine.stop()


def test_one_that_cannot_begin_anew_says_so(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Path(shutil.copytree(directory, tmp_path / "1"))
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    engine = OpenVinoGenAiEngine(PipelineOptions("m", moved, cache_blocks=256))
    engine.start(ignored, told.put)
    try:
        running = asked(engine, LONG, id="a").begun()
        assert engine.is_ready()
        shutil.rmtree(moved)
        poison = poisoned(engine, monkeypatch)
        for heard in (running, poison):
            with pytest.raises(Internal, match="The engine failed while it ran this request"):
                heard.over()
        assert "'m': the engine cannot restart: " in told.get(timeout=20)
        assert not engine.is_healthy()
        assert not engine.is_ready()
        with pytest.raises(Unavailable):
            asked(engine)
    finally:
        engine.stop()


def context(directory: Path, **parameters: str) -> ModelContext:
    given = {key: {"string_value": value} for key, value in parameters.items()}
    return ModelContext("m", 1, directory.parent, {"backend": "llm", "parameters": given})


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"MAX_NUM_SEQ": "4"}, "Did you mean MAX_NUM_SEQS"),
        ({"MAX_NUM_SEQS": "0"}, "'MAX_NUM_SEQS' of model 'm' is 0; it must be above 0"),
        ({"MAX_NUM_SEQS": "many"}, "failed to convert 'many' to integral number, in parameter 'MAX_NUM_SEQS'"),
        ({"INFERENCE_NUM_THREADS": "many"}, "failed to convert 'many' to integral number"),
        ({"MAX_MODEL_LEN": "5000"}, "'MAX_MODEL_LEN' of model 'm' is 5000, but the model has 4000 positions"),
    ],
)
def test_parameters_that_are_wrong(directory: Path, parameters: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        options.read(context(directory, **parameters), InstanceContext("m_0"))


def test_a_parameter_of_another_engine_is_refused_and_not_left_out(directory: Path) -> None:
    with pytest.raises(Unsupported, match="'TENSOR_PARALLEL_SIZE', which the engine openvino_genai does not support"):
        options.read(context(directory, TENSOR_PARALLEL_SIZE="2"), InstanceContext("m_0"))
    with pytest.raises(Unsupported, match="'NORMALIZE', which the engine openvino_genai does not support"):
        options.read(context(directory, NORMALIZE="true"), InstanceContext("m_0"))


def test_parameters(directory: Path) -> None:
    read = options.read(context(directory, MAX_MODEL_LEN="100", KV_CACHE_PRECISION="u8"), InstanceContext("m_0"))
    assert read.context_length == 100
    assert read.properties is not None
    assert read.properties["KV_CACHE_PRECISION"] == "u8"
    assert options.read(context(directory), InstanceContext("m_0")).context_length == CONTEXT


def test_not_in_the_server(directory: Path) -> None:
    with pytest.raises(InvalidArgument, match="which would block the server"):
        LlmBackend().open(context(directory, EXECUTION_MODE="in_process"))


def test_what_cannot_be_completed(directory: Path, tmp_path: Path) -> None:
    backend, whole = LlmBackend(), context(directory)
    wrong: dict[str, Any] = {
        "max_batch_size": 4,
        "input": [{"name": "text_input", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}],
    }
    for field, value in wrong.items():
        with pytest.raises(InvalidArgument, match="model 'm'"):
            backend.complete(replace(whole, config={**whole.config, field: value}))
    (tmp_path / "1").mkdir()
    with pytest.raises(Unavailable, match=r"holds no language model\. Expected a Hugging Face checkpoint"):
        backend.complete(replace(whole, directory=tmp_path))
    (tmp_path / "1" / "openvino_model.xml").touch()
    with pytest.raises(Unavailable, match=r"has no openvino_tokenizer.xml, openvino_detokenizer.xml"):
        backend.complete(replace(whole, directory=tmp_path))
