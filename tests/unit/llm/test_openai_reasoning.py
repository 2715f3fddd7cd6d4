"""What a model thinks is told from what it answers, whatever the pieces in which text comes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.llm.openai import chat_requests, reasoning_parsers
from nerite.llm.openai.chat_templates import ChatModel
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields
from nerite.llm.openai.reasoning_parsers import ReasoningParser
from nerite.llm.openai.tool_calls import Event, ReasoningText, ToolCall, ToolParser

THINK = "{% for each in messages %}{{ each.content }}{% endfor %}<think>"
CASES: list[tuple[bool, str, str, str]] = [
    (False, "<think>\nFirst.\n\nThen.\n</think>\n\nSo.", "First.\n\nThen.", "So."),
    (True, "First.</think>So.", "First.", "So."),
    (True, "<think>First.</think>So.", "First.", "So."),
    (True, "never ends", "never ends", ""),
    (False, "No thought, but <think>.", "", "No thought, but <think>."),
    (False, " <thin", "", " <thin"),
    (True, "a < b </thi", "a < b </thi", ""),
    (False, "<think>\n\n</think>\n\nSo.", "", "So."),
    (False, "", "", ""),
]


def read(parser: ToolParser, *pieces: str) -> tuple[str, str]:
    """Return thoughts and text."""
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    thought = "".join(event.text for event in events if isinstance(event, ReasoningText))
    return thought, "".join(event for event in events if isinstance(event, str))


def parser(begun: bool) -> ReasoningParser:
    markers = reasoning_parsers.ALL["think"]
    return ReasoningParser(markers.begin, markers.end, None, begun=begun)


@pytest.mark.parametrize(("begun", "text", "thought", "answer"), CASES)
def test_whole_and_by_characters(begun: bool, text: str, thought: str, answer: str) -> None:
    assert read(parser(begun), text) == (thought, answer)
    assert read(parser(begun), *text) == (thought, answer)


@given(st.sampled_from(CASES), st.data())
def test_any_pieces(case: tuple[bool, str, str, str], data: st.DataObject) -> None:
    begun, text, thought, answer = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parser(begun), *pieces) == (thought, answer)


def test_endless_space_is_not_held_back() -> None:
    thinking = parser(True)
    thinking.feed("a")
    assert sum(
        len(event.text) for _ in range(400) for event in thinking.feed(" " * 10) if isinstance(event, ReasoningText)
    )


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("…<think>…", "think"),
        ("…[THINK]…", "mistral"),
        ("<|START_THINKING|>", "command"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("Here is my thought process", "granite"),
        ("plain", "none"),
    ],
)
def test_thoughts_are_known_by_their_template(template: str, name: str) -> None:
    assert reasoning_parsers.reasoning_parser_of(template) == name


def model(folder: Path, template: str = THINK, family: str = "", thinks: str = "") -> ChatModel:
    (folder / "chat_template.jinja").write_text(template)
    return ChatModel("m", folder, "", family, thinks)


def chat(**fields: object) -> chat_requests.ChatRequest:
    return chat_requests.chat_request(Fields({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}))


def test_the_prompt_says_whether_a_thought_has_begun(tmp_path: Path) -> None:
    made = model(tmp_path)
    for prompt, expected in ((b"a<think>\n", ("b", "c")), (b"a", ("", "b</think>c"))):
        found = made.parser(chat(), prompt)
        assert found is not None and read(found, "b</think>c") == expected


def test_a_grammar_leaves_no_room_for_thoughts(tmp_path: Path) -> None:
    assert model(tmp_path).parser(chat(guided_regex="a"), b"a<think>") is None


def test_thoughts_that_are_not_wanted(tmp_path: Path) -> None:
    found = model(tmp_path).parser(chat(include_reasoning=False), b"a<think>")
    assert found is not None and read(found, "b</think>c") == ("", "c")


def test_a_call_in_a_thought_is_none(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    found = model(tmp_path, "{{ tools }}<tool_call><think>").parser(chat(tools=tools), b"a<think>")
    assert found is not None
    events = found.feed(f"{text}</think>{text}") + found.finish()
    assert sum(isinstance(event, ToolCall) for event in events) == 1


def test_parsers_are_named(tmp_path: Path) -> None:
    assert model(tmp_path, thinks="none").parser(chat(), b"a<think>") is None
    with pytest.raises(ApiError, match=r"REASONING_PARSER of model 'm' is 'thinks'.* Did you mean 'think'\?"):
        model(tmp_path, thinks="thinks")
