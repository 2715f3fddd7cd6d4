"""Chat templates: found where they are, and rendered as Hugging Face does."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nerite.core.errors import Unsupported
from nerite.llm.openai import chat_templates
from nerite.llm.openai.chat_templates import ChatTemplate
from nerite.llm.openai.errors import ApiError

HELLO: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Look"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "look", "arguments": {"at": "<sky>"}}}],
    },
    {"role": "tool", "tool_call_id": "x", "content": "blue"},
]


def rendered(source: str, messages: list[dict[str, Any]] | None = None, **more: Any) -> str:
    template = ChatTemplate(source, "here", {"bos_token": "<s>"}, lambda: datetime(2026, 11, 5))
    given = {"messages": messages or [], "tools": more.pop("tools", None), **more}
    text = template.render(given)
    assert template.render_briefly(given, seconds=60) == text
    return text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}|", "<s>|"),
        ("{{ {'a': '<b>'} | tojson }}", '{"a": "<b>"}'),
        ("{{ ['é'] | tojson(indent=1) }}", '[\n "é"\n]'),
        ("{{ strftime_now('%d %b %Y') }}", "05 Nov 2026"),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}", "13"),
        ("{% for n in [1, 2] %}\n    {% generation %}\n{{ n }}{% endgeneration %}\n{% endfor %}", "12"),
        ("{{ add_generation_prompt }}{{ tools is none }}{{ undefined_thing }}", "TrueTrue"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    assert rendered(source, enable_thinking=False) == text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.strip() }}", r"the chat template \(here\) failed"),
        ("{{ ''.__class__.__mro__ }}", r"failed: access to attribute '__class__'"),
        ("{{ ('{0.__class__.__mro__}' | attr('format'))('x') }}", "failed: access to attribute '__class__'"),
        ("{% set _ = messages.append(1) %}", "failed: access to attribute .append. of .list. object is unsafe"),
        ("{% for n in range(10 ** 6) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_is_refused(source: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        rendered(source)
    assert (refused.value.param, refused.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * ['a'] }}",
        "{{ 9**(9**9) }}",
        "{% set ns = namespace(x=7) %}{% for n in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a\nb' | indent(10**10) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ [1] | batch(10**10, 'x') | list }}",
        "{{ 'a'.center(10**10) }}",
        "{{ ['a'] | map('center', 10**10) | list }}",
        "{% set f = 'a'.zfill %}{{ f(10**10) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
    ],
)
def test_values_without_end(source: str) -> None:
    """Refused before they are made: no deadline could end the one operation that makes them."""
    template = ChatTemplate(source, "here", {})
    with pytest.raises(ApiError, match=r"the chat template (makes a value of more|asks for more) than 1000000"):
        template.render({"messages": []})
    with suppress(ApiError):
        assert template.render_briefly({"messages": []}) is None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if 1 %}" * 5_000, "is invalid"),
        ("{{" + "(" * 10_000, "is invalid"),
        ("{{ 'a' | format }}", "is invalid: No filter named 'format'"),
        ("a" * 100_000, "has 100000 characters; at most 65536 are compiled"),
    ],
)
def test_templates_that_cannot_be_compiled(source: str, says: str) -> None:
    with pytest.raises(ApiError, match=rf"The chat template \(here\) {says}"):
        ChatTemplate(source, "here", {})


def test_no_template() -> None:
    with pytest.raises(ApiError, match=r"The chat template \(here\) is invalid"):
        rendered("{% if %}")


def test_jinja_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(Unsupported, match=r"pip install 'nerite\[openai\]'"):
        rendered("")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "system: Be brief.\nuser: Hello\nassistant: Hi\nuser: Bye\nassistant:"),
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<s>[INST]Be brief.\n\nHello[/INST]Hi</s>[INST]Bye[/INST]"),
    ],
)
def test_our_own(name: str, text: str) -> None:
    assert name in chat_templates.NAMES
    found = chat_templates.find_template(None, name)
    assert rendered(found.source, HELLO) == text
    assert found.plain is (name == "plain")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("chatml", '<tool_call>\n{"name": "look", "arguments": {"at": "<sky>"}}\n</tool_call>'),
        ("llama3", '{"name": "look", "parameters": {"at": "<sky>"}}<|eot_id|>'),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {"at": "<sky>"}, "id": "x"}]</s>'),
    ],
)
def test_our_own_with_tools(name: str, call: str) -> None:
    source = chat_templates.find_template(None, name).source
    text = rendered(source, CALLED, tools=[TOOL])
    assert call in text and "blue" in text
    assert '"name": "look"' in rendered(source, CALLED[:1], tools=[TOOL])


def test_where_a_template_is(tmp_path: Path) -> None:
    found = chat_templates.find_template(tmp_path, "")
    assert (found.model_s_own, found.plain, found.origin) == (False, True, "built-in 'plain'")
    tokenizer = tmp_path / "tokenizer_config.json"
    words = {"bos_token": {"content": "<b>"}, "eos_token": "<e>", "unk_token": None}
    tokenizer.write_text(json.dumps({**words, "chat_template": "one"}))
    found = chat_templates.find_template(tmp_path, "")
    assert (found.source, found.with_tools, found.words) == ("one", "one", {"bos_token": "<b>", "eos_token": "<e>"})
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    tokenizer.write_text(json.dumps({"chat_template": named}))
    found = chat_templates.find_template(tmp_path, "")
    assert (found.source, found.with_tools, found.model_s_own, found.plain) == ("one", "two", True, False)
    (tmp_path / "chat_template.jinja").write_text("three")
    assert chat_templates.find_template(tmp_path, "").source == "three"
    (tmp_path / "mine.jinja").write_text("four")
    assert chat_templates.find_template(tmp_path, "mine.jinja").source == "four"
    assert "im_start" in chat_templates.find_template(tmp_path, "chatml").source


def test_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    """As repositories of Triton's vLLM backend have it."""
    version, checkpoint = tmp_path / "1", tmp_path / "checkpoint"
    version.mkdir()
    checkpoint.mkdir()
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one", "bos_token": "<b>"}))
    for place, found in ((str(checkpoint), "one"), ("some/name", chat_templates.find_template(None, "").source)):
        (version / "model.json").write_text(json.dumps({"model": place}))
        assert chat_templates.find_template(version, "").source == found


@pytest.mark.parametrize(
    ("parameter", "tokenizer", "says"),
    [
        ("chatlm", "{}", "Did you mean 'chatml'"),
        ("../outside.jinja", "{}", "neither a file in"),
        ("", "{", "is not JSON"),
        ("", "[]", "is not an object"),
        ("", '{"chat_template": [1]}', "neither a string nor a list"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, parameter: str, tokenizer: str, says: str) -> None:
    (tmp_path / "outside.jinja").write_text("")
    version = tmp_path / "1"
    version.mkdir()
    (version / "tokenizer_config.json").write_text(tokenizer)
    with pytest.raises(ApiError, match=says):
        chat_templates.find_template(version, parameter)


NESTED = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}done"
MACRO = "{% macro again(n) %}{% if n %}{{ again(n - 1) }}{{ again(n - 1) }}{% endif %}{% endmacro %}{{ again(40) }}"


@pytest.mark.parametrize("source", [NESTED, MACRO], ids=["loops", "macros"])
def test_what_takes_longer_is_given_up(source: str) -> None:
    template = ChatTemplate(source, "here", {})
    began = time.monotonic()
    assert template.render_briefly({"messages": HELLO * 1000, "tools": None}) is None
    assert time.monotonic() - began < 10
    assert ChatTemplate(NESTED, "here", {}).render_briefly({"messages": HELLO, "tools": None}, seconds=60) == "done"


@pytest.mark.parametrize(("value", "briefly"), [(True, True), ("low", True), (5, False), ([5], False), ({}, False)])
def test_variables_by_which_a_template_may_do_much_are_for_the_helper(value: Any, briefly: bool) -> None:
    template = ChatTemplate("{{ thing }}", "here", {})
    assert (template.render_briefly({"messages": HELLO, "tools": None, "thing": value}) is not None) is briefly


def test_a_template_that_is_given_up_leaves_time_for_the_next() -> None:
    template = ChatTemplate(NESTED, "here", {})
    assert template.render_briefly({"messages": HELLO * 1000, "tools": None}) is None
    assert template.render({"messages": HELLO * 5, "tools": None}) == "done"


def test_images_in_a_template_of_text_alone() -> None:
    """What Python says of a list where the template expects text is nothing that a client could do something with."""
    parts = [{"type": "text", "text": "what is it"}, {"type": "image"}]
    with pytest.raises(ApiError) as refused:
        messages = [HELLO[0], {"role": "user", "content": parts}]
        rendered("{% for each in messages %}{{ each.role + each.content }}{% endfor %}", messages)
    assert refused.value.param == "messages[1].content[1].type"
    assert "the model takes no parts of the type 'image_url'" in refused.value.message
