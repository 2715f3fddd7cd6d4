"""Changing some fields in the text of a config.pbtxt, and leaving the rest, comments too, as somebody wrote it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nerite.config.cursor import CLOSERS, OPENERS
from nerite.config.model_config import ModelConfig
from nerite.config.text_form import to_text
from nerite.config.tokens import Token, Tokenizer


def edited(text: str, old: ModelConfig, new: ModelConfig) -> str:
    """Return ``text``, which says ``old`` without a mistake, such that it says ``new``.

    A field that changes stands where it stood; one that is new stands at the end.
    """
    spans = list(_spans(text))
    cuts: list[tuple[int, int, str]] = []
    added = ""
    for field in dataclasses.fields(ModelConfig):
        value = getattr(new, field.name)
        if value == getattr(old, field.name):
            continue
        printed = to_text(dataclasses.replace(ModelConfig(), **{field.name: value}))
        places = [(start, end) for name, start, end in spans if name == field.name]
        if not places:
            added += f"\n{printed}" if printed else ""
        for number, (start, end) in enumerate(places):
            written = "" if number else printed.rstrip("\n")
            # A line with nothing left on it goes.
            whole = not written and text[end : end + 1] == "\n" and text[:start][-1:] in ("", "\n")
            cuts.append((start, end + whole, written))
    for start, end, written in sorted(cuts, reverse=True):
        text = text[:start] + written + text[end:]
    if added and text and not text.endswith("\n"):
        text += "\n"
    return text + (added if text else added.removeprefix("\n"))


def _spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each field of the configuration itself."""
    starts = [0]
    starts += [place + 1 for place, character in enumerate(text) if character == "\n"]

    def offset(token: Token) -> int:
        return starts[token.position.line - 1] + token.position.column - 1

    depth, name, start, end = 0, "", 0, 0
    previous = ""
    for token in Tokenizer(text).tokens:
        if depth == 0 and token.kind in ("identifier", "end") and previous != ":":
            if name:
                yield name, start, end
            name, start = token.text, offset(token)
        if token.kind == "symbol":
            depth += (token.text in OPENERS) - (token.text in CLOSERS)
        previous = token.text
        end = offset(token) + len(token.text)
