"""What a router reads in bodies: the model, and hints for the choice of a member. Never wrong for odd JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core.errors import InvalidArgument
from nerite.router.body_facts import SMALL, form_facts, generate_facts, openai_facts, sequence_of

LARGE = "x" * SMALL


def body(document: Any) -> memoryview:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return memoryview(bytearray(text))


@pytest.mark.parametrize("padding", ["", LARGE])
def test_what_is_found(padding: str) -> None:
    facts = openai_facts(
        body({"messages": [{"role": "user", "content": padding + '"model":"no"'}], "model": "m", "stream": True,
              "max_tokens": 5, "user": "u", "n": 2, "previous_response_id": "resp_1", "other": {"model": "no"}})
    )  # fmt: skip
    assert facts.continues == "resp_1"
    assert facts[:4] == ("m", True, 10.0, "u")
    assert bytes(facts.prompt).lstrip(b'"messages: ').startswith(b"[{")


@pytest.mark.parametrize("padding", ["", LARGE])
@pytest.mark.parametrize(
    "text",
    [
        '{"model":"first","model":"m","prompt":"%s"}',
        '{"mod\\u0065l":"m","prompt":"%s"}',
        ' {\n"prompt" : "%s\\\\\\"" ,\t"model" : "m" } ',
        '{"prompt":["%s","]}\\"",["{"],{"model":"no"}],"model":"m"}',
        '{"prompt":"%s","x":1e5,"y":null,"z":true,"model":"m"}',
        '{"prompt":"%s","model":"\\u006d"}',
        '{"prompt":"%s ' + '\\"' * 9000 + '","model":"m"}',
    ],
)
def test_odd_json(text: str, padding: str) -> None:
    assert openai_facts(body((text % padding).encode())).model == "m"


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"1", b"{}", b'{"model":1}', b'{"model":""}', b'{"model":"m"', b"\xff", b'{"model":"m"}}'],
)
@pytest.mark.parametrize("padding", [b"", b" " * SMALL])
def test_what_cannot_be_routed(text: bytes, padding: bytes) -> None:
    with pytest.raises(InvalidArgument):
        openai_facts(body(padding + text))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=20)


@given(st.dictionaries(st.text(), values, max_size=6), NAMES, st.booleans())
def test_large_json_is_read_like_small_json(more: dict[str, Any], model: str, plain: bool) -> None:
    document = {**more, "padding": LARGE, "model": model, "user": "u"}
    text = json.dumps(document, ensure_ascii=not plain)
    assert openai_facts(body(text.encode())).model == model


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"parameters": {"sequence_id": 7, "sequence_start": True}}, ("7", True, False)),
        ({"parameters": {"sequence_id": "a", "sequence_end": True}}, ("a", False, True)),
        ({"sequence_id": 7, "text_input": "x"}, ("7", False, False)),
        ({"parameters": {"sequence_id": 0}}, ("", False, False)),
        ({"inputs": [{"data": ['"sequence_id"']}]}, ("", False, False)),
        (b'{"parameters":{"sequence\\u005fid":7}}', ("7", False, False)),
        (b'{"parameters":{"sequence_id":7}', ("", False, False)),
        ({}, ("", False, False)),
    ],
)
def test_sequences(document: Any, found: tuple[str, bool, bool]) -> None:
    assert sequence_of(body(document)) == found


def test_generate() -> None:
    limit, prompt = generate_facts(body({"parameters": {"max_tokens": 12}, "text_input": "hello"}))
    assert limit == 12
    assert bytes(prompt).startswith(b'"text_input"')
    assert generate_facts(body({"text_input": "hello"}))[0] == 0


def field(name: str, value: bytes, quote: str = '"') -> bytes:
    head = f"--edge\r\nContent-Disposition: form-data; name={quote}{name}{quote}\r\n\r\n"
    return head.encode() + value + b"\r\n"


@pytest.mark.parametrize("quote", ['"', ""])
def test_a_form(quote: str) -> None:
    file = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n\0\xff\r\n'
    body = file + field("model", b"ear", quote) + field("stream", b"True", quote) + field("user", b"u", quote)
    facts = form_facts(memoryview(body + b"--edge--\r\n"))
    assert (facts.model, facts.streams, facts.user, bytes(facts.prompt)) == ("ear", True, "u", b"")


@pytest.mark.parametrize("body", [b"", b'name="model"\r\n', field("model", b""), field("model", b"x" * 2000)])
def test_a_form_without_a_model(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="names no model"):
        form_facts(memoryview(body))
