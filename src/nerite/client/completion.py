"""What a text model writes under ``/v1``, part by part: OpenAI's events to plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nerite.client.error import ClientError, text_in


@dataclass(frozen=True, slots=True)
class Part:
    """What has come of an answer. What it does not tell is empty."""

    text: str = ""
    finish_reason: str = ""
    """Why there is no more: ``stop``, ``length``; empty while more comes."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @classmethod
    def read(cls, chunk: Mapping[str, Any]) -> Part:
        """Read a chunk of a chat completion; of its choices the first."""
        choice: Mapping[str, Any] = next(iter(chunk.get("choices") or ()), {})
        usage = chunk.get("usage") or {}
        text = (choice.get("delta") or {}).get("content") or ""
        reason = choice.get("finish_reason") or ""
        return cls(text, reason, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def parts(lines: Iterable[bytes]) -> Iterator[Part]:
    """Read the lines of an event stream. Raises ``ClientError`` for an event that is an error, or none at all."""
    for line in lines:
        event = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or event == b"[DONE]":
            continue
        try:
            chunk = json.loads(event)
            part = None if "error" in chunk else Part.read(chunk)
        except (ValueError, TypeError, AttributeError) as error:
            raise ClientError(f"the server's answer is no chat completion: {error}", 200) from error
        if part is None:
            raise ClientError(text_in(chunk["error"]), 200)
        yield part
