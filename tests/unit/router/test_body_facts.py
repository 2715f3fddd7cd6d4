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
FORM = "multipart/form-data; boundary=edge"


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


@pytest.mark.parametrize("padding", ["", LARGE, "[" * 90 + "{}," * 4000])
@pytest.mark.parametrize(
    "text",
    [
        '{"model":"cheap","model":"m","prompt":"%s"}',
        '{"model":"m","prompt":"%s","mod\\u0065l":"m2"}',
        '{"\\u006Dodel":"m","prompt":"%s","model":"m2"}',
        '{"model":"m","prompt":"%s","MODEL":"m2"}',
        '{"Model":"m","prompt":"%s","model":"m2"}',
        '{"model":"m","prompt":"%s","x":{"model":1},"y":["model"],"model" \n: "m2"}',
    ],
)
def test_two_models_are_refused(text: str, padding: str) -> None:
    with pytest.raises(InvalidArgument, match=r"twice|uppercase"):
        openai_facts(body((text % padding).encode()))


@pytest.mark.parametrize(
    "text", [b'{"prompt":"%s"}\0', b'{"prompt":"\0%s","model":"m"}', b'{"model":"m","prompt":"%s"}{}']
)
def test_what_parsers_may_read_otherwise(text: bytes) -> None:
    for padding in (b"", LARGE.encode()):
        with pytest.raises(InvalidArgument, match="not JSON"):
            openai_facts(body(text % padding))
    wide = json.dumps({"model": "m", "prompt": LARGE})
    for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig"):
        with pytest.raises(InvalidArgument, match=r"not JSON|not a JSON object"):
            openai_facts(body(wide.encode(encoding)))


@pytest.mark.parametrize(
    "unit",
    [
        b"[],",
        b'{"":0},',
        b'{"model":"x"},',
        b'"model",',
        b'"mode\\u006c",',
        b'"\\"",',
        b'"\\\\",',
        b'"a\\\\\\"",',
        b"1,",
    ],
)
def test_the_model_behind_any_text(unit: bytes) -> None:
    for size in (10, 3_000, 65_500 // len(unit), 70_000, 300_000):
        text = b'{"messages":[%b0],"user":"u","model":"m"}' % (unit * size)
        assert openai_facts(body(text))[:4] == ("m", False, 0.0, "u")
        inside = json.dumps((unit * size).decode()).encode()
        assert openai_facts(body(text.replace(b'"messages":', b'"x":%b,"y":' % inside))).model == "m"


@pytest.mark.parametrize("unit", ['"model%d":0', '"x%d":"model"', '"modem%d":{"model":1}', '"\\u006d%d":[]'])
def test_many_members(unit: str) -> None:
    for count, told in ((1000, ""), (70_000, "more than 2048 names and texts")):
        many = ",".join(unit % number for number in range(count)).encode()
        for text in (b'{"model":"m",%b}' % many, b'{%b,"model":"m"}' % many):
            try:
                assert openai_facts(body(text)).model == "m"
            except InvalidArgument as refused:
                assert told and told in refused.message


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), values, max_size=6), st.text(min_size=1, max_size=20), st.booleans())
def test_large_json_is_read_like_small_json(more: dict[str, Any], model: str, plain: bool) -> None:
    more = {key: value for key, value in more.items() if key.lower() not in ("model", "user")}
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


@pytest.mark.parametrize("padding", ["1", "1," * 300_000 + "1", "[]," * 300_000 + "1"])
def test_sequences_beside_data(padding: str) -> None:
    inputs = f'"inputs":[{{"data":[{padding}],"sequence_id":8,"parameters":{{"sequence_id":9}}}}]'
    parameters = '"parameters":{"a":{"sequence_id":6},"sequence_id":7,"sequence_end":true}'
    for text in (f"{{{inputs},{parameters}}}", f"{{{parameters},{inputs}}}"):
        assert sequence_of(body(text.encode())) == ("7", False, True)
    twice = '"parameters":{"sequence_id":1,"sequence\\u005fid":2}'
    for odd in (f"{{{parameters},{inputs},{parameters}}}", f"{{{twice},{inputs}}}"):
        with pytest.raises(InvalidArgument, match="twice"):
            sequence_of(body(odd.encode()))


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
    facts = form_facts(memoryview(body + b"--edge--\r\n"), FORM)
    assert (facts.model, facts.streams, facts.user, bytes(facts.prompt)) == ("ear", True, "u", b"")


@pytest.mark.parametrize("parts", [b"", b'name="model"\r\n', field("model", b""), field("file", field("model", b"x"))])
def test_a_form_without_a_model(parts: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"names no model|has no name"):
        form_facts(memoryview(field("a", b"") + parts + b"--edge--"), FORM)


def test_a_form_with_two_models() -> None:
    for second in (field("model", b"b"), field("Model", b"b"), field("model", b"b", "")):
        with pytest.raises(InvalidArgument, match="'model' twice"):
            form_facts(memoryview(field("model", b"a") + second + b"--edge--"), FORM)
    inside = field("file", b'\r\nContent-Disposition: form-data; name="model"\r\n\r\ncheap\r\n')
    assert form_facts(memoryview(inside + field("model", b"m") + b"--edge--"), FORM).model == "m"


def test_the_name_in_a_form_is_bounded() -> None:
    with pytest.raises(InvalidArgument, match="characters long"):
        form_facts(memoryview(field("model", b"x" * 100_000) + b"--edge--"), FORM)
