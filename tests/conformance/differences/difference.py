"""One entry of the list."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

NEVER = "-"
"""Triton's answer to what it is not asked, because it would end, hang or take the connection with it."""


@dataclass(frozen=True)
class Difference:
    """One thing that is otherwise."""

    what: str
    why: str
    answers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By exchange, how Triton's answer begins and how ours does. Empty where no exchange can show it.

    ``topic/name#2`` is the second answer of an exchange. ``topic/name`` is its first, and what comes after it is not
    compared: it follows from the difference.
    """


def said(text: str, model: str = "lab") -> str:
    """How the answer of a model begins that says ``text`` in its only output, SAID."""
    output = {"name": "SAID", "datatype": "BYTES", "shape": [1], "data": [text]}
    answer = {"model_name": model, "model_version": "1", "outputs": [output]}
    return f"200 {json.dumps(answer)}".removesuffix('"]}]}')
