"""Delta debugging: the least of an input that still shows what is wrong. Pure: it asks, and is told.

Each function is a generator. It yields a candidate, is sent whether that one still fails, and returns the least that it
found. A tree is yielded as it is at the moment: it changes with the next question.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from fuzz.case import Case
from fuzz.mutators import documents
from fuzz.mutators.documents import Members, Raw

T = TypeVar("T")
Trial = Generator[T, bool, T]


def fewest(items: Sequence[T]) -> Trial[list[T]]:
    """Shrink a list to items none of which can be left out, in their order (Zeller's ddmin)."""
    kept = list(items)
    size = max(1, len(kept) // 2)
    while kept:
        at, less = 0, False
        while at < len(kept):
            candidate = kept[:at] + kept[at + size :]
            if (yield candidate):
                kept, less = candidate, True
            else:
                at += size
        if size == 1 and not less:
            break
        size = max(1, size // 2)
    return kept


def simplest(tree: Any) -> Trial[Any]:
    """Shrink a tree of ``documents``: members and elements are left out, values replaced by simple ones."""
    holder = [tree]
    todo: list[documents.Place] = [(holder, 0)]
    while todo:
        container, index = todo.pop()
        value = container[index]

        def put(made: Any, container: list[Any] = container, index: int = index) -> Any:
            container[index] = made
            return holder[0]

        for simple in _simpler(value):
            if (yield put(simple)):
                break
            put(value)
        else:
            kind = type(value)
            if isinstance(value, (str, Raw, list)) and len(value):
                join = "".join if isinstance(value, str) else kind
                kept = yield from _through(fewest(list(value)), lambda part, put=put, join=join: put(join(part)))
                put(join(kept))
            value = container[index]
            if isinstance(value, Members):
                todo += [(pair, 1) for pair in value]
            elif isinstance(value, list):
                todo += [(value, at) for at in range(len(value))]
    return holder[0]


def _simpler(value: Any) -> list[Any]:
    """Return what may stand for a value, the simplest first."""
    if value in ("", 0, None) or isinstance(value, bool):
        return []
    return [0, ""] if isinstance(value, str) else [0]


def least(case: Case, fixed: int) -> Trial[Case]:
    """Shrink an input: parts beyond the first ``fixed`` are left out, then each part is shrunk.

    Where parts are fixed the first is a head: lines of it are left out, but for the first, which says what is asked.
    """
    parts = list(case.parts)
    if len(parts) > fixed:
        rest = yield from _through(fewest(parts[fixed:]), lambda kept: case._replace(parts=(*parts[:fixed], *kept)))
        parts[fixed:] = rest
    for at, part in enumerate(parts):

        def whole(made: Any, at: int = at) -> Case:
            text = made if isinstance(made, bytes) else documents.dumped(made)
            return case._replace(parts=(*parts[:at], text, *parts[at + 1 :]))

        if fixed and not at:
            first, *lines = part.split(b"\n")
            kept = yield from _through(
                fewest(lines), lambda some, first=first, whole=whole: whole(b"\n".join([first, *some]))
            )
            parts[at] = b"\n".join([first, *kept])
            continue
        tree = _tree(part)
        if tree is not None and (yield whole(tree)):
            parts[at] = documents.dumped((yield from _through(simplest(tree), whole)))
        else:
            parts[at] = bytes((yield from _through(fewest(part), lambda kept, whole=whole: whole(bytes(kept)))))
    return case._replace(parts=tuple(parts))


def _tree(part: bytes) -> list[Any] | None:
    """Return a part that is JSON with members or elements as a tree; None for any other, and for very deep ones."""
    try:
        tree = json.loads(
            part,
            object_pairs_hook=lambda pairs: Members([name, value] for name, value in pairs),
            parse_constant=lambda word: Raw(word.encode()),
        )
        documents.dumped(tree)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, list) else None


def _through(steps: Generator[Any, bool, Any], made: Callable[[Any], Any]) -> Generator[Any, bool, Any]:
    """Run ``steps``, whose candidates are asked about in the form that ``made`` gives them."""
    try:
        candidate = next(steps)
        while True:
            candidate = steps.send((yield made(candidate)))
    except StopIteration as end:
        return end.value


def run(steps: Trial[T], fails: Callable[[T], bool]) -> T:
    """Run a trial whose answers are known at once."""
    try:
        candidate = next(steps)
        while True:
            candidate = steps.send(fails(candidate))
    except StopIteration as end:
        made: T = end.value
        return made
