"""What language models are asked: made-up prompts of a length, or those in a file; as requests under ``/v1``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from nerite.bench.forms.http import post
from nerite.bench.plan import Plan
from nerite.bench.preparation import Target
from nerite.bench.scripts import Turns
from nerite.client import ClientError

_SYLLABLES: Final = ("ka", "re", "mi", "to", "na", "lo", "shi", "ve", "du", "pa", "san", "tor", "el", "in")
_MADE_UP: Final = 64
"""Different prompts, so that a server that remembers prompts does not know the next one."""
_TEXTS: Final = ("prompt", "text", "text_input")
"""Under which names a line of JSON may have its prompt: those of aiperf and genai-perf among them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be asked of a language model."""

    model: str
    words: int = 100
    """The length of prompts that are made up."""
    data: Path | None = None
    """A file of prompts instead: a line each, of text or of JSON."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else goes with each request: ``max_tokens``, ``temperature`` and so on."""


def prepared(wanted: Wanted, target: Target) -> Plan:
    """Return a plan for a model under ``/v1``. Raises ``ClientError``."""
    chats = made_up(wanted.words) if wanted.data is None else read(wanted.data)
    headers = {**target.headers, "Content-Type": "application/json"}
    path = "/chat/completions" if target.address.prefix.endswith("/v1") else "/v1/chat/completions"
    fixed = {"model": wanted.model, "stream": True, "stream_options": {"include_usage": True}, **wanted.settings}
    messages = [post(target.address, path, headers, [orjson.dumps({**fixed, "messages": chat})]) for chat in chats]
    return target.plan(Turns(messages), streaming=True)


def made_up(words: int) -> list[Sequence[Mapping[str, Any]]]:
    """Return prompts of so many words. They are the same each time."""
    generator = np.random.default_rng(words)
    prompts = []
    for _ in range(_MADE_UP):
        sizes = generator.integers(1, 4, words)
        prompts.append(" ".join("".join(generator.choice(_SYLLABLES, size)) for size in sizes))
    return [_chat(prompt) for prompt in prompts]


def read(path: Path) -> list[Sequence[Mapping[str, Any]]]:
    """Return the chats in a file. Raises ``ClientError``."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError(f"the prompts in {path} cannot be read: {error}") from None
    if not lines:
        raise ClientError(f"there are no prompts in {path}")
    return [_of_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _of_line(line: str, place: str) -> Sequence[Mapping[str, Any]]:
    if not line.startswith("{"):
        return _chat(line)
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"{place} is no JSON: {error}") from None
    if isinstance(document.get("messages"), list):
        messages: Sequence[Mapping[str, Any]] = document["messages"]
        return messages
    text = next((document[name] for name in _TEXTS if name in document), None)
    if not isinstance(text, str):
        raise ClientError(f'{place} has no prompt: write {{"prompt": TEXT}} or {{"messages": [...]}}')
    return _chat(text)


def _chat(prompt: str) -> Sequence[Mapping[str, Any]]:
    return [{"role": "user", "content": prompt}]
