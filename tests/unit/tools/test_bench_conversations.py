"""Requests that follow a plan: their content by endpoint, and conversations that go on with what was answered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nerite.client import ClientError
from nerite.client.connection import Address
from nerite.tools.bench.conversations import Conversations, Endpoint, PromptForm, made_up_text, read_prompts
from nerite.tools.bench.forms import Cancelling, RoundRobin, Script
from nerite.tools.bench.planning import CancelPlan, Distribution, Workload
from nerite.tools.bench.replay import TracedRequest

TEN = Distribution.parse("10")


def conversations(workload: Workload, endpoint: Endpoint = "chat", prefix: str = "", **more: Any) -> Conversations:
    form = PromptForm(Address(False, "here", 80, prefix), {}, endpoint, more.pop("settings", {}))
    return Conversations(form, workload, tuple(workload.models) or ("m",), **more)


def next_of(script: Script) -> tuple[str, dict[str, Any]]:
    """Return path and body of the next request."""
    head, _, body = script.following().partition(b"\r\n\r\n")
    return head.split()[1].decode(), json.loads(body)


def test_texts_are_as_long_as_asked_and_begin_differently() -> None:
    for words in (1, 3, 4, 5, 100, 200_000):
        assert len(made_up_text(7, words).split()) == words
    assert made_up_text(70_000, 50) == made_up_text(70_000, 50)
    beginnings = {tuple(made_up_text(place << 16, 20).split()[:4]) for place in range(1_000)}
    assert len(beginnings) == 1_000


def test_the_content_is_that_of_the_endpoint() -> None:
    workload = Workload(TEN, texts=Distribution.parse("2"), query=Distribution.parse("3"))
    plain = Workload(TEN, outputs=Distribution.parse("5"))
    path, body = next_of(conversations(plain, settings={"temperature": 0}).begin(0, 1)())
    assert path == "/v1/chat/completions"
    (message,) = body.pop("messages")
    assert message["role"] == "user" and len(message["content"].split()) == 10
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
    }
    path, body = next_of(conversations(plain, "completions", "/v1").begin(0, 1)())
    assert path == "/v1/completions" and len(body["prompt"].split()) == 10
    path, body = next_of(conversations(replace(workload, query=None), "embeddings").begin(0, 1)())
    assert path == "/v1/embeddings" and [len(text.split()) for text in body["input"]] == [10, 10]
    assert "stream" not in body and body["input"][0] != body["input"][1]
    path, body = next_of(conversations(workload, "rerank").begin(0, 1)())
    assert path == "/v1/rerank" and len(body["query"].split()) == 3 and len(body["documents"]) == 2
    path, body = next_of(conversations(workload, "score").begin(0, 1)())
    assert path == "/v1/score" and len(body["text_1"].split()) == 3 and len(body["text_2"]) == 2


def test_texts_are_counted_without_the_query() -> None:
    workload = Workload(TEN, texts=Distribution.parse("2"), query=Distribution.parse("3"))
    script = conversations(workload, "rerank").begin(0, 1)()
    script.following()
    assert script.dialogue is not None and script.dialogue.texts == 2


def test_a_conversation_goes_on_with_what_was_answered() -> None:
    workload = Workload(TEN, turns=Distribution.parse("3"), think=Distribution.parse("2"))
    script = conversations(workload, system_tokens=6).begin(0, 1)()
    user = script.dialogue
    assert user is not None
    for turn in range(3):
        messages = next_of(script)[1]["messages"]
        assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * turn, "user"]
        assert user.listens == (turn < 2)
        if user.listens:
            user.heard(f"answer {turn}")
        assert user.pause() == (2 if turn < 2 else None)
    assert [message["content"] for message in messages if message["role"] == "assistant"] == ["answer 0", "answer 1"]
    assert len(next_of(script)[1]["messages"]) == 2


def test_a_conversation_that_broke_is_over() -> None:
    script = conversations(Workload(TEN, turns=Distribution.parse("3"))).begin(0, 1)()
    assert script.dialogue is not None
    first = next_of(script)[1]["messages"]
    script.dialogue.broken()
    assert script.dialogue.pause() is None
    assert len(second := next_of(script)[1]["messages"]) == 1 and second != first


def test_slots_and_generators_hold_different_conversations() -> None:
    scripts = conversations(Workload(TEN))
    make = scripts.begin(0, 2)
    told = [next_of(script)[1]["messages"][0]["content"] for script in (make(), make(), scripts.begin(1, 2)())]
    alone = scripts.begin(0, 1)()
    # Numbers 0, 2 and 1: together they are those of one generator.
    assert sorted(told) == sorted(next_of(alone)[1]["messages"][0]["content"] for _ in range(3))


def test_system_prompts_are_shared_in_part() -> None:
    for share, distinct in ((1.0, 1), (0.0, 50)):
        scripts = conversations(Workload(TEN, shared_system=share), system_tokens=9).begin(0, 1)()
        assert len({next_of(scripts)[1]["messages"][0]["content"] for _ in range(50)}) == distinct


def test_adapters_are_models() -> None:
    script = conversations(Workload(TEN, models={"base": 1.0, "poet": 1.0})).begin(0, 1)()
    assert script.dialogue is not None
    for _ in range(20):
        assert next_of(script)[1]["model"] == ("base", "poet")[script.dialogue.model]


def test_prompts_of_a_file_take_turns() -> None:
    prompts = [[{"role": "user", "content": text}] for text in ("a", "b")]
    script = conversations(Workload(TEN), prompts=prompts).begin(0, 1)()
    assert [next_of(script)[1]["messages"] for _ in range(3)] == [prompts[0], prompts[1], prompts[0]]
    script = conversations(Workload(TEN), "completions", prompts=prompts).begin(0, 1)()
    assert next_of(script)[1]["prompt"] == "a"
    script = conversations(Workload(TEN), "embeddings", prompts=prompts).begin(0, 1)()
    assert next_of(script)[1]["input"] == ["a"]


def test_a_trace_has_lengths_texts_and_beginnings_in_common() -> None:
    trace = [
        TracedRequest(0, 1_000, 7, (1, 2)),
        TracedRequest(1, 700, 8, (1, 3)),
        TracedRequest(2, text="Who?"),
        TracedRequest(3, 1_100, 9, (4,)),
        TracedRequest(4, 1_100, 9, (4,)),
        TracedRequest(5),
    ]
    script = conversations(Workload(TEN), trace=trace).begin(0, 1)()
    bodies = [next_of(script)[1] for _ in trace]
    words = [body["messages"][0]["content"].split() for body in bodies]
    assert [len(each) for each in words] == [1_000, 700, 1, 1_100, 1_100, 10]
    assert words[2] == ["Who?"]
    assert words[0][:512] == words[1][:512] and words[0][512:520] != words[1][512:520]
    assert words[3][:512] == words[4][:512] and words[3][512:] != words[4][512:]
    assert [body.get("max_tokens") for body in bodies] == [7, 8, None, 9, 9, None]


def test_cancelled_requests_are_drawn_for_requests_of_every_kind() -> None:
    scripts = Cancelling(RoundRobin((b"a", b"b")), CancelPlan(0.5, Distribution.parse("3")), 0)
    script = scripts.begin(0, 1)()
    assert script.dialogue is not None and script.ending() is None
    drawn = []
    for number in range(200):
        assert script.following() == (b"a", b"b")[number % 2]
        drawn.append(script.dialogue.cancel_after)
    assert set(drawn) == {None, 3.0}
    assert 70 < drawn.count(3.0) < 130
    assert script.dialogue.pause() is None


@pytest.mark.parametrize(
    "text, said",
    [("", "contains no prompts"), ("{\n", "line 1 is not JSON"), ('{"x": 1}', "line 1 has no prompt: write")],
)
def test_what_is_no_prompt(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ClientError, match=said):
        read_prompts(file)
