"""Client text: what is refused, and how messages show it."""

import pytest

from nerite.core import errors
from nerite.core.text import MAX_MESSAGE, MAX_SHOWN, bounded, cut, quoted_text, text_error


def test_plain_text_has_no_mistake() -> None:
    assert text_error("größe/tensor:0") is None
    assert text_error("") is None


def test_text_that_is_too_long_says_by_how_much() -> None:
    assert text_error("x" * 11, 10) == "is 11 characters long, more than the 10 that are allowed"


@pytest.mark.parametrize("raw", [b"ab\xff", b"ab\xed\xa0\x80"])
def test_bytes_that_are_not_utf8_are_a_mistake(raw: bytes) -> None:
    assert text_error(raw.decode(errors="surrogateescape")) == "is not valid UTF-8 at character 2"


def test_shown_text_keeps_both_ends() -> None:
    text = quoted_text("a" * 500 + "z" * 500)
    assert len(text) == MAX_SHOWN
    assert text.startswith("aaa") and text.endswith("zzz") and "…" in text
    assert quoted_text("short") == "short"
    quoted_text("\udcff").encode()


def test_messages_of_errors_are_bounded() -> None:
    long = "n" * 5_000
    message = errors.InvalidArgument(f"unexpected input '{long}' for model {long}").message
    assert message.startswith("unexpected input 'nnn") and message.count("…") == 2
    assert len(message) < 2 * MAX_SHOWN + 50
    assert len(errors.Internal("word " * 10_000_000).message) < MAX_MESSAGE + 50
    errors.Internal("half a character \ud800").message.encode()


def test_text_that_is_cut_says_how_much_is_missing() -> None:
    assert cut("x" * 12, 10) == "x" * 10 + "… (2 more characters)"
    assert cut("x" * 10, 10) == "x" * 10


def test_a_message_of_usual_length_is_not_changed() -> None:
    message = "model 'add' does not exist\n    There are: 'add_sub', 'identity'. " * 100
    assert bounded(message) == message
    message = f"model 'add' cannot do what {'it was asked to do ' * 20}: leave 'parameters' out, it's the model's"
    assert bounded(message) == message


def test_bounding_is_not_quadratic() -> None:
    # A quadratic expression would exceed the time limit of the test.
    for unit in ("'", "'a", "'" + "a " * MAX_MESSAGE, "a" * 199 + " "):
        text = unit * (1 + MAX_MESSAGE // len(unit))
        for _ in range(20):
            bounded(text)
