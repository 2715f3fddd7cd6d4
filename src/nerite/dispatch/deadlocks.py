"""Deadlocks between models: detects calls that only an instance that waits for them could answer, and refuses one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from nerite.core.errors import Unavailable
from nerite.core.model_calls import CallRequest
from nerite.core.request import InferenceRequest, ServedVersion

# Detection. Pure.
#
# A request that a model sends to another model waits for an instance of that model; while instances in turn wait for
# responses, they may all wait for each other, forever. Then every path through the wait graph leads to a waiter. If one
# path leads to an instance that is idle, or executing without waiting, that instance will become free eventually: there
# is no deadlock.

Waiting = TypeVar("Waiting", bound=Hashable)


def is_deadlocked(start: Waiting, ways: Callable[[Waiting], Sequence[Waiting]]) -> list[Waiting]:
    """Return all waiters that are deadlocked if ``start`` is, with ``start`` first; empty if it is not.

    ``ways`` returns what a waiter waits for: any one of these suffices, and none means that the wait ends by itself.
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
    """Return waiters that each wait for the next, and the last for one that is in the list before it.

    ``start`` is deadlocked, as ``is_deadlocked`` has found.
    """
    chain: dict[Waiting, None] = {}
    while start not in chain:
        chain[start] = None
        start = ways(start)[0]
    return [*chain, start]


def break_deadlocks(request: InferenceRequest) -> None:
    """If ``request`` is in a deadlock, refuse a call that is part of the cycle."""
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
    return request.header.route.version
