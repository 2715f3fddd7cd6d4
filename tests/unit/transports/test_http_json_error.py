"""Mistakes in JSON, in the words of Triton's parser."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
from collections.abc import Callable
from typing import Any

import json_reference
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.transports.http import json_text
from nerite.transports.http.json_text import parse_json

HEAD = "failed to parse the request JSON buffer: "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "The document is empty. at 0"),
        (b" \n", "The document is empty. at 2"),
        (b"hello", "Invalid value. at 0"),
        (b'{"inputs":[', "Invalid value. at 11"),
        (b"{'inputs':[]}", "Missing a name for object member. at 1"),
        (b'{"inputs":[],}', "Missing a name for object member. at 13"),
        (b'{"a" 1}', "Missing a colon after a name of object member. at 5"),
        (b'{"a":1 "b":2}', "Missing a comma or '}' after an object member. at 7"),
        (b"[1 2]", "Missing a comma or ']' after an array element. at 3"),
        (b"[01]", "Missing a comma or ']' after an array element. at 2"),
        (b"[+1]", "Invalid value. at 1"),
        (b"[1] x", "The document root must not be followed by other values. at 4"),
        (b"/* c */ []", "Invalid value. at 0"),
        (b'["abc', "Missing a closing quotation mark in string. at 5"),
        (b"\0", "The document is empty. at 0"),
        (b"[1,\0]", "Invalid value. at 3"),
        (b'["ab\0c"]', "Missing a closing quotation mark in string. at 4"),
        (b'["\\x"]', "Invalid escape character in string. at 2"),
        (b'["\\u12g4"]', "Incorrect hex digit after \\u escape in string. at 2"),
        (b'["\\ud83d"]', "The surrogate pair in string is invalid. at 2"),
        (b'["\\ud83dxx"]', "The surrogate pair in string is invalid. at 2"),
        (b'["\\udc00"]', "The surrogate pair in string is invalid. at 2"),
        (b'["a\nb"]', "Invalid escape character in string. at 3"),
        (b"[1.]", "Miss fraction part in number. at 3"),
        (b"[1e]", "Miss exponent in number. at 3"),
        (b"[1e400]", "Number too big to be stored in double. at 1"),
        (b"[-]", "Invalid value. at 2"),
    ],
)
def test_the_first_mistake_and_where_it_is(text: bytes, message: str) -> None:
    with pytest.raises(json_text.JsonError) as caught:
        json_text.loads_like_triton(text)
    assert str(caught.value) == message
    with pytest.raises(Internal) as refused:
        parse_json(text)
    assert refused.value.message == HEAD + message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a":[1,2.5,"x",true,null]}', {"a": [1, 2.5, "x", True, None]}),
        (b" \n[ 1 ,\t2 ] \r\n", [1, 2]),
        (b"\xef\xbb\xbf[1]", [1]),
        (b'["\\ud83d\\ude00"]', ["\U0001f600"]),
        (b"[1] \0, what follows a zero", [1]),
        (b"[18446744073709551615]", [18446744073709551615]),
        (b'"x"', "x"),
    ],
)
def test_what_is_right(text: bytes, value: object) -> None:
    assert parse_json(text) == value


def test_strings_that_are_not_utf8_are_for_the_caller_to_allow() -> None:
    text = b'{"data":["\xff"],"id":"x"}'
    with pytest.raises(InvalidArgument, match="'data\\[0\\]' is not valid UTF-8"):
        parse_json(text)
    assert parse_json(text, lambda document: document["id"]) == {"data": ["\udcff"], "id": "x"}


def test_integers_beyond_64_bits_are_no_integers() -> None:
    for words in (b"", b",NaN"):  # with which another parser reads the text
        numbers = parse_json(
            b"[18446744073709551615,-9223372036854775808,18446744073709551616,-9223372036854775809%b]" % words
        )
        assert numbers[:4] == [2**64 - 1, -(2**63), 2.0**64, -(2.0**63)]
        assert [type(number) for number in numbers[:4]] == [int, int, float, float]


def test_words_that_are_numbers_here() -> None:
    values = parse_json(b"[NaN,Infinity,-Infinity,Inf,-Inf,1]")
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, math.inf, -math.inf, 1]


def test_words_in_texts_stay_texts() -> None:
    assert parse_json(b'["Inf, -Inf", NaN, "a\\"Inf"]')[::2] == ["Inf, -Inf", 'a"Inf']


def test_too_deep() -> None:
    text = b"[" * 1500 + b"]" * 1500
    with pytest.raises(InvalidArgument) as caught:
        parse_json(text)
    assert caught.value.message == "JSON nesting depth exceeds maximum allowed limit (100)"
    with pytest.raises(InvalidArgument):
        parse_json(b"[NaN," + b"[" * 101 + b"]" * 101 + b"]")
    parse_json(b"[NaN," + b"[" * 98 + b"]" * 98 + b"]")
    with pytest.raises(InvalidArgument):  # behind more than is looked at in one piece
        parse_json(b"[NaN," + b"1," * 600_000 + b"[" * 101 + b"]" * 101 + b"]")


PIECES = st.sampled_from(
    [
        *(character.encode() for character in '{}[],:"\\-+.eE0189 \n'),
        *(b'"a"', b"1.5", b"true", b"false", b"null", b"NaN", b"Infinity", b"-Infinity", b"Inf", b"-Inf", b'"a":'),
        *(b"\\u", b"\\ud83d", b"\\ude00", b"\\n", b"\xff", b"\xc3\xa9", b"\xef\xbb\xbf", b"9" * 400, b"1e999", b"\0"),
        *(b'"', b"[", b"]", b"{", b"}", b"e+", b"E-5", b"[1,", b'{"x":[', b"\\u12", b"9" * 300 + b"e10", b"9" * 19),
        *(b"[" * 99, b"]" * 99, b"-9223372036854775808", b"18446744073709551616", b"1e300", b"9" * 5000),
    ]
)
TEXTS = st.lists(PIECES, max_size=14).map(b"".join)


def read_slowly(text: bytes) -> Any:
    """Return the document that a text is when each letter is looked at. Raises as ``json_error.loads``."""
    text = text.partition(b"\0")[0]  # a zero ends the text
    json_reference.check(text)
    marked = re.sub(rb'"(?:[^"\\]|\\.)*"|Inf(?:inity)?', lambda it: it[0] if it[0][:1] == b'"' else b"Infinity", text)

    def integer(digits: str) -> int | float:
        number = float(digits)
        return int(digits) if abs(number) < 2.0**70 and -(2**63) <= int(digits) < 2**64 else number

    return json.loads(marked.decode("utf-8", "surrogateescape"), parse_int=integer)


@settings(max_examples=1500)
@given(TEXTS | TEXTS.map(lambda text: b"[" + text + b"]") | TEXTS.map(lambda text: b'["' + text + b'"]'))
@example(b'["\\ud83d')
@example(b'["\\u1234')
@example(b'["a\\')
@example(b'{"a":[1],"b":[[2]] 1}')
@example(b"[Inf,-Inf,Infinit]")
@example(b"[18446744073709551616,Inf,1.]")
@example(b"[" + b"9" * 5000 + b"e]")
@example(b"01e999")
@example(b"\xef\xbb\xbf[1]")
def test_what_is_found_fast_is_what_is_found_slowly(text: bytes) -> None:
    def outcome(read: Callable[[bytes], Any]) -> str:
        try:
            return json.dumps(read(text))
        except json_text.JsonError as error:
            return str(error)
        except json_text.TooDeep:
            return "too deep"

    fast, slow = outcome(json_text.loads_like_triton), outcome(read_slowly)
    if "too deep" in (fast, slow):  # which of two mistakes comes first there is not said
        assert not fast.startswith("[") and not slow.startswith("[")
    else:
        assert fast == slow


@settings(max_examples=300)
@given(TEXTS)
@example(b"[" + b"9" * 5000 + b",NaN]")
@example(b"[" + b"1" * 309 + b",NaN]")
def test_any_text_is_read_or_refused(text: bytes) -> None:
    try:
        value = parse_json(text)
    except NeriteError:
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(text)
        return
    try:
        strict = orjson.loads(text)
    except orjson.JSONDecodeError:
        return
    assert json.dumps(value) == json.dumps(strict)


UTF8 = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | UTF8,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(UTF8, inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_every_json_is_right(value: object) -> None:
    """Also where Python writes NaN and Infinity, and where letters are written as codes."""
    for ensure_ascii in (True, False):
        text = json.dumps(value, ensure_ascii=ensure_ascii).encode()
        assert json.dumps(json_text.loads_like_triton(text)) == json.dumps(json.loads(text))
        assert json.dumps(parse_json(text)) == json.dumps(json.loads(text))


@pytest.mark.parametrize("text", [b"{", b"[1 2]", b"[" * 200, b"[" * 100_000, b'["\\ud800"]', b"[1e999]", b"\xff"])
def test_a_mistake_leaves_nothing_for_the_collector(text: bytes) -> None:
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(NeriteError):
            parse_json(text)
        assert gc.collect() == 0
    finally:
        gc.enable()
