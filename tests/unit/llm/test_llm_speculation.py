"""Tokens that are guessed: by a smaller model, or from the text so far. They come several at a time, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llm_listening import FEW, Heard, asked, eventually, ignored
from llm_models import language_model
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported
from nerite.llm.engine import FinishReason
from nerite.llm.openvino_genai import OpenVinoGenAiEngine, options
from nerite.llm.openvino_genai.options import PipelineOptions
from nerite.llm.structured_output import Grammar

MANY = replace(FEW, max_tokens=60)
ALIKE = 30
"""Tokens after which another may be the likeliest: the cache has eight bits, and several at once are read otherwise."""
ENDLESS = replace(FEW, max_tokens=3000)


@contextmanager
def running(chosen: PipelineOptions) -> Iterator[OpenVinoGenAiEngine]:
    engine = OpenVinoGenAiEngine(chosen)
    engine.start(ignored, ignored)
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model(tmp_path_factory.mktemp("model") / "1", 4000)


@pytest.fixture(scope="module")
def plain(directory: Path) -> PipelineOptions:
    return PipelineOptions("m", directory, cache_blocks=512, context_length=4000)


@pytest.fixture(scope="module")
def expected(plain: PipelineOptions) -> list[int]:
    with running(plain) as engine:
        return asked(engine, MANY).over().tokens()


def steps(heard: Heard) -> int:
    return len(heard.deltas)


@pytest.mark.feature("openvino_genai", "speculation, draft model")
def test_a_draft_model(directory: Path, plain: PipelineOptions, expected: list[int]) -> None:
    # One that guesses as the model itself would: each guess is right.
    with running(replace(plain, draft=directory, guesses=4)) as engine:
        heard = asked(engine, MANY).over()
        assert (heard.tokens(), heard.reason) == (expected, FinishReason.LENGTH)
        assert steps(heard) <= 60 / 4
        told = engine.stats()
        assert told.drafted == told.accepted == 60 - steps(heard)
        several_at_once_and_cut(engine)


@pytest.mark.feature("openvino_genai", "speculation, prompt lookup")
def test_prompt_lookup(plain: PipelineOptions, expected: list[int]) -> None:
    with running(replace(plain, lookup=2, guesses=4)) as engine:
        heard = asked(engine, MANY).over()
        assert (heard.tokens()[:ALIKE], heard.reason) == (expected[:ALIKE], FinishReason.LENGTH)
        assert len(heard.tokens()) == len(expected)
        assert steps(heard) <= 60
        told = engine.stats()
        assert (told.drafted, told.accepted) == (None, 60 - steps(heard))
        several_at_once_and_cut(engine)
        with pytest.raises(Unsupported, match=r"structured output \(regex\) is not supported by the engine"):
            asked(engine, FEW, grammar=Grammar("regex", "a"))


def several_at_once_and_cut(engine: OpenVinoGenAiEngine) -> None:
    alone = asked(engine, FEW).over().tokens()
    many = [asked(engine, ENDLESS, id=str(number)).begun() for number in range(3)]
    sampled = asked(engine, replace(FEW, n=2, temperature=1.0, seed=3), id="sampled").over()
    assert [len(sampled.tokens(index)) for index in range(2)] == [8, 8]
    assert asked(engine, FEW, id="late").over().tokens() == alone
    for number in range(3):
        engine.abort(str(number))
    assert {heard.over().reason for heard in many} == {FinishReason.ABORT}
    eventually(lambda: engine.stats().running == 0)
    assert (asked(engine, FEW, id="after").over().tokens(), engine.stats().failures) == (alone, 0)


def test_parameters(directory: Path) -> None:
    def read(**parameters: str) -> PipelineOptions:
        given = {key: {"string_value": value} for key, value in parameters.items()}
        context = ModelContext("m", 1, directory.parent, {"backend": "llm", "parameters": given})
        return options.read(context, InstanceContext("m_0"))

    assert (read().speculates, read().guesses) == (False, 5)
    assert read(SPECULATIVE_MODEL=str(directory), NUM_SPECULATIVE_TOKENS="3").guesses == 3
    assert read(SPECULATIVE_MODEL="../1").draft == directory / "../1"
    assert read(PROMPT_LOOKUP_MAX="3").lookup == 3
    with pytest.raises(InvalidArgument, match="nothing that proposes tokens"):
        read(NUM_SPECULATIVE_TOKENS="3")
    with pytest.raises(InvalidArgument, match="choose one"):
        read(SPECULATIVE_MODEL=str(directory), PROMPT_LOOKUP_MAX="3")
    with pytest.raises(Unavailable, match=r"'SPECULATIVE_MODEL' of model 'm' is 'nowhere', but '.*' has no openvino_"):
        read(SPECULATIVE_MODEL="nowhere")
