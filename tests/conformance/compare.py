"""Decides whether two answers are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Answer = Mapping[str, Any]


def same(theirs: Answer, ours: Answer) -> bool:
    """Whether ours is theirs, apart from a remedy behind the text of an error."""
    return dict(theirs) == without_remedy(theirs, ours)


def without_hashes(answer: Answer) -> Answer:
    """Return an answer of ours without the hashes that its repository index has of what is served."""
    match answer.get("json"):
        case [{"name": _}, *_] as entries:
            known = [{key: value for key, value in entry.items() if key != "content_hash"} for entry in entries]
            return {**answer, "json": known}
    return answer


def told(theirs: Answer, ours: Answer) -> str:
    """What is otherwise, three lines for each place."""
    lines = []
    for place, expected, found in places(theirs, without_remedy(theirs, ours)):
        lines += [place, f"  Triton  {spelled(expected)}", f"  Nerite  {spelled(found)}"]
    return "\n".join(lines)


def places(theirs: Any, ours: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each innermost place where two answers differ, with what is there."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            yield from places(theirs.get(key), ours.get(key), f"{at}.{key}" if at else key)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
            yield from places(expected, found, f"{at}[{index}]")
    elif theirs != ours:
        yield at, theirs, ours


def spelled(value: Any) -> str:
    """JSON, with the keys in one order, so that the eye finds what is otherwise."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def without_remedy(theirs: Answer, ours: Answer) -> dict[str, Any]:
    """Return ``ours`` with what goes on after Triton's text of the same error cut off."""
    cut = dict(ours)
    if "details" in theirs and "details" in ours:
        cut["details"] = beginning(theirs["details"], ours["details"])
    match theirs.get("json"), ours.get("json"):
        case {"error": str(expected)}, {"error": str(text), **rest} if not rest:
            cut["json"] = {"error": beginning(expected, text)}
    responses = zip(theirs.get("responses", ()), ours.get("responses", ()), strict=False)
    for number, (expected, response) in enumerate(responses):
        if expected.get("error_message") and response.get("error_message"):
            message = beginning(expected["error_message"], response["error_message"])
            cut["responses"] = [*cut["responses"]]
            cut["responses"][number] = {**response, "error_message": message}
    return cut


def beginning(expected: str, text: str) -> str:
    """``expected`` where ``text`` starts with it and goes on behind white space, else ``text``."""
    rest = text[len(expected) :]
    goes_on = text.startswith(expected) and (not rest or rest[0].isspace() or expected[-1:].isspace())
    return expected if goes_on else text
