"""Where Nerite answers otherwise than Triton, on purpose: what, and why.

The exam allows exactly these. Each is tied to the exchanges that show it, with how both answers begin (see ``brief``),
so that an entry cannot outlive its reason. A chapter is a module; ``docs/differences.md``
is made of them all by ``tools/build_differences.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conformance.differences import additions, left_open, mistakes, newer, wording
from conformance.differences.difference import NEVER

CHAPTERS = {
    "Mistakes of Triton that are not repeated": mistakes.DIFFERENCES,
    "What the protocols leave open": left_open.DIFFERENCES,
    "Wording": wording.DIFFERENCES,
    "What a newer Triton does": newer.DIFFERENCES,
    "What Nerite adds": additions.DIFFERENCES,
}


def by_exchange() -> dict[str, tuple[str, str]]:
    """Every allowed pair of answers by its exchange. Raises ``ValueError`` where one exchange is listed twice."""
    found: dict[str, tuple[str, str]] = {}
    entries = [difference for chapter in CHAPTERS.values() for difference in chapter]
    for exchange, pair in (item for difference in entries for item in difference.answers.items()):
        if exchange in found:
            raise ValueError(f"{exchange} is in two entries")
        found[exchange] = pair
    return found


def brief(answer: Mapping[str, Any]) -> str:
    """An answer on one line, the way the list has it: status, then the error's text or the body.

    Of metrics the names of the families.
    """
    if "broken" in answer:
        return f"no answer ({answer['broken']})"
    if "responses" in answer:
        said = [
            each.get("error_message") or each["infer_response"].get("id", "") or "a response"
            for each in answer["responses"]
        ]
        return f"{answer['code']} {answer.get('details', '')} [{', '.join(said)}]".replace("  ", " ")
    if "code" in answer:
        body = answer.get("details", answer.get("message"))
        return f"{answer['code']} {body if isinstance(body, str) else json.dumps(body)}".strip()
    if "families" in answer:
        return f"metrics: {', '.join(sorted(answer['families'])) or 'none'}"
    body = answer.get("json", answer.get("text"))
    if isinstance(body, dict) and "error" in body:
        body = body["error"]
    return f"{answer.get('status', '')} {body if isinstance(body, str) else json.dumps(body)}".strip()


def page() -> str:
    """The text of ``docs/differences.md``."""
    lines = [INTRODUCTION]
    for title, chapter in CHAPTERS.items():
        lines += [f"## {title}", ""]
        for difference in chapter:
            lines += [f"### {difference.what}", "", difference.why, ""]
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

Made by `tools/build_differences.py` from `tests/conformance/differences/`. Do not edit.

Both servers are asked the same questions by `tests/conformance/test_exam.py`, and have to give the same answers:
status, headers, body, gRPC code and message. This page lists what is otherwise, and the exam fails when the list is
incomplete, and when an entry is no longer true. Triton is version 2.51.0. The texts are how an answer begins.

Two rules hold everywhere: an error may go on after Triton's text, with what to do about it; and the repository index
over HTTP has, as `content_hash`, a hash of what each ready version was made from, once it is worked out.
"""

__all__ = ["CHAPTERS", "NEVER", "brief", "by_exchange", "page"]
