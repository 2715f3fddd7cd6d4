"""What came of asking more of a language model than it can do, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from llm_crowd import LEVELS, TENANTS, WITHIN, kept
from token_crowd import Answer

BLOCKS: Final = 200
"""Of KV memory, 32 tokens each: less than as many sequences of the greatest length need."""


class Run(NamedTuple):
    """So many times the peak."""

    times: float
    peak_before: float
    peak_after: float
    """Tokens a second."""
    began: float
    answers: list[Answer]
    blocks: int
    """Of KV memory that were in use at the same time, at the most."""
    differences: list[str]
    """Between what the client was told and what the server has counted."""


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that ``part`` of all do not exceed."""
    return sorted(values)[max(0, int(len(values) * part + 0.999) - 1)] if values else 0.0


def of_runs(runs: Sequence[Run], seconds: float) -> str:
    """Return what came of it all."""
    lines = [
        "| offered | requests/s | answered/s | peak before and after, tokens/s | within their time, tokens/s "
        "| of the peak | wanted | of those that were cut, tokens/s | KV blocks in use, at the most "
        "| counted otherwise by the server |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in runs:
        ended = [answer for answer in each.answers if answer.ended <= each.began + seconds]
        good = sum(answer.tokens for answer in ended if kept(answer)) / seconds
        answered = sum(not answer.limit for answer in ended) / seconds
        cut = sum(answer.tokens for answer in ended if answer.limit) / seconds
        part = good / ((each.peak_before + each.peak_after) / 2)
        lines.append(
            f"| {each.times:g} x | {len(each.answers) / seconds:,.1f} | {answered:,.1f} | {each.peak_before:,.0f}, "
            f"{each.peak_after:,.0f} | {good:,.0f} | **{part:.0%}** | 90% | {cut:,.1f} | {each.blocks} of {BLOCKS} "
            f"| {len(each.differences)} |"
        )
    return "\n".join(lines)


def of_classes(runs: Sequence[Run]) -> str:
    """Return how long those waited who were answered, and why others were refused."""
    lines = [
        "| offered | class | asked | answered | first token, p50 | p99 | promised | kept | refused, cut "
        "| with `Retry-After` |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in runs:
        for level in LEVELS:
            own_ones = [answer for answer in each.answers if answer.asked.level == level.name]
            answered = [answer for answer in own_ones if not answer.limit]
            firsts = [answer.first - answer.due for answer in answered]
            refused = [answer for answer in own_ones if answer.limit]
            again = sum(answer.retry_after for answer in refused)
            why = ", ".join(f"{count:,} `{name}`" for name, count in Counter(a.limit for a in refused).most_common())
            promise = f"{level.first:g} s" if level.first else f"all in {WITHIN:g} s"
            share = sum(map(kept, answered)) / max(len(answered), 1)
            lines.append(
                f"| {each.times:g} x | {level.name} | {len(own_ones):,} | {len(answered):,} "
                f"| {percentile(firsts, 0.5):.2f} s | **{percentile(firsts, 0.99):.2f} s** | {promise} "
                f"| {share:.1%} | {why} | {again:,} of {len(refused):,} |"
            )
    return "\n".join(lines)


def of_tenants(runs: Sequence[Run], seconds: float) -> str:
    """Return what part of the tokens each tenant had, and was to have."""
    lines = [
        f"| offered | {' | '.join(f'{name}, weight {weight}' for name, weight in TENANTS.items())} |",
        f"|---{'|---' * len(TENANTS)}|",
    ]
    for each in runs:
        had: Counter[str] = Counter()
        for answer in each.answers:
            if not answer.limit and answer.ended <= each.began + seconds:
                had[answer.asked.tenant] += answer.asked.prompt + answer.tokens
        cells = []
        for name, weight in TENANTS.items():
            wanted, part = weight / sum(TENANTS.values()), had[name] / max(sum(had.values()), 1)
            cells.append(f"{part:.1%} of {wanted:.1%}: **{part / wanted - 1:+.1%}**")
        lines.append(f"| {each.times:g} x | {' | '.join(cells)} |")
    return "\n".join(lines)
