"""Which members of a pool have room for requests that must make nobody wait: the class ``idle``, items of batches.

A language model of Nerite knows its room itself and refuses what it has none for. Of every other member the router has
to know: such requests go where no other request is, and only a few at once, because nobody would stop them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from nerite.balancing.member import RoutedRequest, ServerKind
from nerite.balancing.member_load import MemberLoad

_AT_ONCE: Final = 8
"""Idle requests at a language model that does not refuse them."""
_KV_USED: Final = 0.8
"""Share of the KV cache in use from which a language model has no idle room."""
_OTHERS: Final = 0.5
"""Tokens under way from elsewhere that do not count as work of others: estimates fade away slowly."""


def idle_members(loads: Iterable[MemberLoad], idle: Mapping[str, int], request: RoutedRequest) -> set[str]:
    """Return the names of the members that have idle room for a request.

    ``idle`` is the number of idle requests that are under way at each member.
    """
    model = request.model
    return {
        load.member.name
        for load in loads
        if load.available
        and (load.models is None or model in load.models)
        and _has_room(load, idle.get(load.member.name, 0), tensors=request.answer_tokens > 0)
    }


def _has_room(load: MemberLoad, idle: int, *, tensors: bool) -> bool:
    """Return whether a member has room. ``tensors``: for one execution of a model that is no language model."""
    if load.report.waiting > 0 or load.report.kv_used > _KV_USED:  # neither holds for what was not reported
        return False
    if load.member.kind is ServerKind.NERITE and not tensors:
        return True
    if load.requests > idle or load.others > _OTHERS:
        return False
    most = 1.0 if tensors else _AT_ONCE
    return idle < max(most * load.member.capacity, 1.0)


def has_others(loads: Iterable[MemberLoad], models: Iterable[str], items: int) -> bool:
    """Return whether members that serve one of ``models`` execute requests besides ``items`` of these models."""
    wanted = frozenset(models)
    requests = 0
    for load in loads:
        if load.ready and (load.models is None or not wanted.isdisjoint(load.models)):
            requests += load.requests
            if load.others > _OTHERS:
                return True
    return requests > items
