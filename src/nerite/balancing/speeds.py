"""Compares how fast the members of a pool advance answers, model by model: one model says nothing of another.

Only answers that have begun count, as the time before depends on the prompt and on what was cached of it; and tensors,
whose requests are alike.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median
from typing import Final

from nerite.balancing.member_load import MemberLoad

_ENOUGH_NS: Final = 100_000_000
"""Time of answers of a model that a member must have had in a window."""


def compare_speeds(loads: Collection[MemberLoad], window_ns: int, now_ns: int) -> None:
    """Close a window of all members of a pool."""
    speeds: dict[str, list[float]] = {}
    for load in loads:
        for model, (tokens, spent_ns) in load.timings.items():
            if spent_ns >= _ENOUGH_NS:
                speeds.setdefault(model, []).append(tokens / spent_ns)
    usual = {model: median(found) for model, found in speeds.items() if len(found) > 1}
    for load in loads:
        done = spent = 0.0
        for model, (tokens, spent_ns) in load.timings.items():
            if spent_ns >= _ENOUGH_NS and usual.get(model):
                # Weighted by time: what it did, in the time that the usual member would have taken for it.
                done += tokens / usual[model]
                spent += spent_ns
        load.close_window(window_ns, done / spent if spent else None, now_ns)
