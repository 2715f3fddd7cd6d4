"""Events of chat completions, read."""

from __future__ import annotations

import pytest

from nerite.client import ClientError, CompletionPart
from nerite.client.models import completion_parts


def test_parts() -> None:
    lines = [
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n',
        b"\n",
        b": a comment\n",
        b'data: {"choices": [{"delta": {"content": "Hel"}, "finish_reason": null}], "usage": null}\n',
        b'data:{"choices": [{"delta": {"content": "lo"}}]}\n',
        b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n',
        b"data: [DONE]\n",
    ]
    assert list(completion_parts(lines)) == [
        CompletionPart(),
        CompletionPart("Hel"),
        CompletionPart("lo"),
        CompletionPart("", "stop"),
        CompletionPart("", "", 3, 2),
    ]


@pytest.mark.parametrize("event", [b"{", b"[]", b"7", b'{"choices": 7}', b'{"choices": [7]}'])
def test_what_is_no_completion(event: bytes) -> None:
    with pytest.raises(ClientError, match="not a chat completion"):
        list(completion_parts([b"data: " + event]))


def test_an_error_after_the_first_event() -> None:
    for error in (b'{"message": "gave up", "code": null}', b'"gave up"'):
        with pytest.raises(ClientError, match=r"^gave up$"):
            list(completion_parts([b'data: {"error": %b}' % error]))
