"""Calls that could only be answered by an instance that waits for them: found when they arise, and refused."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from nerite.core.errors import Unavailable
from nerite.core.model_calls import CallRequest
from nerite.core.request import InferenceRequest, ServedVersion

# Who waits for whom, and whether anything can come of it. Pure.
#
# A request that a model sends to another model waits for an instance of that; while instances wait in their turn for
# answers, they may all wait for each other, and for ever. Then every way leads to somebody who waits. Where one way
# leads to an instance that is free, or at work by itself, that will be free sooner or later: no reason to worry.

Waiting = TypeVar("Waiting", bound=Hashable)


def is_deadlocked(start: Waiting, ways: Callable[[Waiting], Sequence[Waiting]]) -> list[Waiting]:
    """Return all that wait for ever if ``start`` does, with ``start`` in front; else nothing.

    ``ways`` says what somebody waits for: any of these will do, and none means that the wait ends by itself.
    """
    waiting: dict[Waiting, None] = {}
    ahead = [start]
    while ahead:
        each = ahead.pop()
        if each not in waiting:
            further = ways(each)
            if not further:
                return []
            waiting[each] = None
            ahead += further
    return list(waiting)


def cycle(start: Waiting, ways: Callable[[Waiting], Sequence[Waiting]]) -> list[Waiting]:
    """Return some that wait each for the next, the last one for one that is in the list before it.

    ``start`` waits for ever, as ``deadlocked`` has found.
    """
    chain: dict[Waiting, None] = {}
    while start not in chain:
        chain[start] = None
        start = ways(start)[0]
    return [*chain, start]


def break_deadlocks(request: InferenceRequest) -> None:
    """If ``request`` waits for ever, with others that wait for each other, refuse a call that is part of that."""
    start = request.origin
    if not is_deadlocked(start, _ways):
        return
    waiting = cycle(start, _ways)
    models = " -> ".join(each.header.model_name for each in waiting)
    for each in waiting:
        if isinstance(each, CallRequest) and not _version(each).begun(each):
            each.refuse(
                Unavailable(
                    f"model '{each.header.model_name}' can never answer this call: each model waits for the next in "
                    f"{models}\n    Give one of them more instances (instance_group {{ count }}), or have them call in "
                    "one direction only."
                )
            )
            return


def _ways(request: InferenceRequest) -> Sequence[InferenceRequest]:
    return _version(request).waits_for(request)


def _version(request: InferenceRequest) -> ServedVersion:
    assert request.header.route is not None, "a request that waits was submitted"
    return request.header.route[1]
