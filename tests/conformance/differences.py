"""Where Nerite answers otherwise than Triton, on purpose: what, and why.

The exam allows exactly these. Each is tied to the exchanges that show it, with how both answers begin (see ``brief``),
so that an entry cannot outlive its reason. ``docs/differences.md`` is made from this list by
``tools/build_differences.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


DIFFERENCES = (
    # ---- Mistakes of Triton that are not repeated ----
    Difference(
        "Requests that end Triton's process",
        "A request must never end the server. It is refused like any other mistake.",
        {
            "classification/of texts": (NEVER, "400 class result not available for output"),
            "classification/gRPC: of texts": (NEVER, "INVALID_ARGUMENT class result not available for output"),
            "classification/of no elements": (NEVER, "200"),
            "infer_json/dimension of 2^63 - 1": (NEVER, "400"),
            "infer_json/elements beyond 64 bits": (NEVER, "400"),
            "infer_json/bytes beyond 64 bits": (NEVER, "400"),
        },
    ),
    Difference(
        "Answers of Python models that leave Triton waiting for ever",
        "None in place of a response is a mistake of the model; its caller is told at once.",
        {
            "python_models/none": (NEVER, "500"),
            "python_models/nothing": (NEVER, "500"),
            "python_models/gRPC: none": (NEVER, "INTERNAL"),
            "python_models/gRPC: nothing": (NEVER, "INTERNAL"),
        },
    ),
    Difference(
        "HTTP requests sent before the answer to the one before",
        "Triton drops them. Pipelining is part of HTTP/1.1.",
        {
            "http_routes/two requests at once": (NEVER, "200"),
            "http_routes/three requests at once, one of them refused": (NEVER, "404 Not Found"),
        },
    ),
    Difference(
        "A connection kept open under HTTP/1.0",
        "Triton sends no Content-Length, so that the client waits for the end of the connection.",
        {"http_routes/HTTP/1.0 that keeps the connection": (NEVER, "200")},
    ),
    Difference(
        "HTTP that cannot be parsed",
        "Triton closes the connection without a word. Nerite says 400 first.",
        {
            "http_routes/no HTTP at all": ("no answer", "400"),
            "http_routes/header without a colon": ("no answer", "400"),
            "infer_json/wrong content length": ("no answer", "400"),
        },
    ),
    Difference(
        "Chunk extensions and trailers",
        "Both are part of HTTP/1.1, and ignored. Triton closes the connection.",
        {"http_routes/chunked body with a trailer": ("no answer", '200 {"model_name": "echo"')},
    ),
    Difference(
        "A needed input left out beside an optional one",
        "Triton counts the inputs and does not look at their names, so that the model runs without the input.",
        {
            "infer_json/needed input missing beside optional ones": (
                '200 {"model_name": "options"',
                "400 [request id: <id_unknown>] expected number of inputs between 2 and 3 but got 2 inputs",
            )
        },
    ),
    Difference(
        "Shapes over gRPC whose size in bytes does not fit 64 bits",
        "Triton's size is what remains of it in 64 bits. Nerite names the true one.",
        {
            "grpc_infer/elements beyond 64 bits": (
                "INVALID_ARGUMENT [request id: <id_unknown>] input byte size mismatch",
                "INVALID_ARGUMENT",
            ),
            "grpc_infer/bytes beyond 64 bits": (
                "INVALID_ARGUMENT [request id: <id_unknown>] input byte size mismatch",
                "INVALID_ARGUMENT",
            ),
        },
    ),
    # ---- Wording ----
    Difference(
        "Names of classes and files in the errors of Python models",
        "They are the names of Triton's C++ module and of Python's import machinery; Nerite shows its own class, and "
        "of a traceback the part that belongs to the model.",
        {
            "python_models/not a list": (
                "500 Failed to process the request(s) for model 'trouble_0', message: Expected a list",
                "500 Failed to process the request(s) for model 'trouble_0', message: Expected a list",
            ),
            "python_models/gRPC: not a list": (
                "INTERNAL Failed to process the request(s) for model 'trouble_0', message: Expected a list",
                "INTERNAL Failed to process the request(s) for model 'trouble_0', message: Expected a list",
            ),
            "repository_explicit/a reload that fails#1": (
                "400 load failed for model 'echo': version 1 is at UNAVAILABLE state: Internal: RuntimeError",
                "400 load failed for model 'echo': version 1 is at UNAVAILABLE state: Internal: RuntimeError",
            ),
        },
    ),
    # ---- Of a newer Triton ----
    Difference(
        "Parameters of a Python model's response",
        "Newer versions of Triton take bool, int and str; Nerite does as they do.",
        {
            "python_models/parameters": (
                "500 Failed to process the request(s) for model 'trouble_0', message: TypeError",
                '200 {"model_name": "trouble", "model_version": "1", "parameters"',
            ),
            "python_models/gRPC: parameters": (
                "INTERNAL Failed to process the request(s) for model 'trouble_0', message: TypeError",
                'OK {"model_name": "trouble", "model_version": "1", "parameters"',
            ),
        },
    ),
)


def by_exchange() -> dict[str, tuple[str, str]]:
    """Every allowed pair of answers by its exchange. Raises ``ValueError`` where one exchange is listed twice."""
    found: dict[str, tuple[str, str]] = {}
    for difference in DIFFERENCES:
        for exchange, pair in difference.answers.items():
            if exchange in found:
                raise ValueError(f"{exchange} is in two entries")
            found[exchange] = pair
    return found


def brief(answer: Mapping[str, Any]) -> str:
    """An answer on one line, the way the list above has it: status, then the error's text or the body."""
    if "broken" in answer:
        return f"no answer ({answer['broken']})"
    if "code" in answer:
        body = answer.get("details", answer.get("message"))
        return f"{answer['code']} {body if isinstance(body, str) else json.dumps(body)}".strip()
    body = answer.get("json", answer.get("text"))
    if isinstance(body, dict) and "error" in body:
        body = body["error"]
    return f"{answer.get('status', '')} {body if isinstance(body, str) else json.dumps(body)}".strip()


def page() -> str:
    """The text of ``docs/differences.md``."""
    lines = [INTRODUCTION]
    for difference in DIFFERENCES:
        lines += [f"## {difference.what}", "", difference.why, ""]
        if difference.answers:
            lines += ["| Exchange | Triton | Nerite |", "|---|---|---|"]
            for exchange, (theirs, ours) in difference.answers.items():
                lines.append(f"| {cell(exchange)} | {cell(theirs)} | {cell(ours)} |")
            lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text as a cell of a table."""
    return "none" if text == NEVER else text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


INTRODUCTION = """\
# Where Nerite differs from Triton

Made by `tools/build_differences.py` from `tests/conformance/differences.py`. Do not edit.

Both servers are asked the same questions by `tests/conformance/test_exam.py`, and have to give the same answers:
status, headers, body, gRPC code and message. This page lists what is otherwise, and the exam fails when the list is
incomplete, and when an entry is no longer true. Triton is version 2.51.0. The texts are how an answer begins.

One rule holds everywhere: an error may go on after Triton's text, with what to do about it.
"""
