"""Nerite's router beside smg, vllm-router, Envoy and Ray Serve: the same requests to the same members, by turns.

The members are stand-ins for engines, with a real prefix cache and the step times of a real one (``paced_engine.py``);
those of Ray Serve are in its replicas, for its proxy serves nothing else. Requests come at random moments, whether or
not others were answered (open loop), and are the same for all routers. Each run has new members and a new router; its
first seconds do not count. Figures are medians of the rounds.

``cost`` is what a router adds: it has one processor for itself, and the members answer after 20 ms. Latency is without
the time that the member says it had the request. ``sizes`` is the same by the size of prompts. ``memory`` sends a
million prompts, no two alike, and looks at the memory of Nerite's router. ``openvino`` is shared prefixes before three
``nerite serve`` with a language model on OpenVINO.

    python benchmarks/routers.py [--cases WORD ...] [--routers WORD ...] [--seconds S] [--rounds N] [--print]

The other routers are installed on first use, into ``~/.cache/nerite-routers``.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import routed_openvino
from page import command_line, machine, publish
from routed_by import RAY, ROUTERS, Members, Router, RunningRouter, ray_serve
from routed_cases import CASES, MEMBERS, Case, Result, plain_messages, quantiles, result
from routed_client import RoutedAnswer, run
from routed_members import FirstMember, engines
from routed_memory import memory_table

_WARM: Final = 6.0
"""Seconds at the beginning of a run that do not count."""
_COST_RATE: Final = 500.0
_COST_TOKENS: Final = 200
_RAY_RATE: Final = 50.0
"""Requests a second that Ray Serve is asked for instead: on one processor it cannot do more."""
_FIXED: Final = "--fixed=0.02"
_SIZES: Final = ((200, 200.0), (2_000, 100.0), (20_000, 50.0), (100_000, 20.0))
"""Tokens of prompts, with requests a second."""
DIRECT: Final = "direct"
NAMES: Final = (*(each.name for each in ROUTERS), RAY)


class Cost(NamedTuple):
    """Of one run. Times in milliseconds."""

    p50: float
    p99: float
    processor: float
    megabytes: float
    failed: int


@contextmanager
def routed(
    name: str, flags: Sequence[Sequence[str]], folder: Path, members_under: Sequence[str], router_under: Sequence[str]
) -> Iterator[tuple[list[int], RunningRouter | None, FirstMember]]:
    """Run members, and a router before them; yield the ports to ask, the router and the first member."""
    with ExitStack() as stack:
        if name == RAY:
            router, first = stack.enter_context(ray_serve(flags, folder, router_under))
            yield [router.port], router, first
            return
        members = stack.enter_context(engines(flags, folder, members_under))
        ports = [each.port for each in members]
        if name == DIRECT:
            yield ports, None, members[0]
            return
        router = stack.enter_context(_router(name).running(Members(ports), folder, router_under))
        yield [router.port], router, members[0]


def _router(name: str) -> Router:
    return next(each for each in ROUTERS if each.name == name)


def case_run(name: str, case: Case, seed: int, seconds: float) -> Result:
    """Run a case once through a router."""
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as directory,
        routed(name, case.flags(), Path(directory), (), ()) as (ports, router, first),
        case.happening(first, _WARM, seconds),
    ):
        before = router.processor_seconds() if router else 0.0
        answers = run(ports, case.messages(chance), case.rate, _WARM + seconds, chance)
        spent = router.processor_seconds() - before if router else 0.0
    return result(counted(answers), spent * len(counted(answers)) / max(len(answers), 1))


def counted(answers: Sequence[RoutedAnswer]) -> list[RoutedAnswer]:
    """Return the answers to requests after the first seconds."""
    return [each for each in answers if each.sent - answers[0].sent >= _WARM]


def cost_run(name: str, tokens: int, rate: float, seed: int, seconds: float) -> Cost:
    """Send plain requests once through a router that has a processor for itself."""
    cores = sorted(os.sched_getaffinity(0))
    mine, others = str(cores[-1]), ",".join(map(str, cores[:-1] or cores))
    os.sched_setaffinity(0, cores[:-1] or cores)
    try:
        with tempfile.TemporaryDirectory() as directory:
            flags = [[_FIXED]] * MEMBERS
            pin = [["taskset", "-c", others], ["taskset", "-c", mine]]
            with routed(name, flags, Path(directory), *pin) as (ports, router, _):
                chance = random.Random(seed)
                messages = plain_messages(tokens, chance)
                run(ports, messages, rate, 2.0, chance)
                before = router.processor_seconds() if router else 0.0
                answers = run(ports, messages, rate, seconds, chance)
                spent = router.processor_seconds() - before if router else 0.0
                megabytes = router.megabytes() if router else 0.0
    finally:
        os.sched_setaffinity(0, cores)
    took = [each.ended - each.sent - each.served for each in answers if each.ended]
    p50, _, p99 = quantiles(took, (0.5, 0.9, 0.99))
    failed = sum(bool(each.problem) for each in answers)
    return Cost(p50 * 1e3, p99 * 1e3, spent / len(answers) * 1e3, megabytes, failed)


def cost_table(names: Sequence[str], tokens: int, rate: float, given: argparse.Namespace) -> str:
    """Return what routers cost with prompts of a size."""
    found: dict[str, list[Cost]] = {name: [] for name in (DIRECT, *names)}
    for turn in range(given.rounds):
        for name, costs in found.items():
            costs.append(cost_run(name, tokens, min(rate, _RAY_RATE) if name == RAY else rate, turn, given.seconds))
    lines = [
        "| | p50, ms | p99, ms | added p50 | added p99 | processor time a request, ms | memory, MB | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    direct = found[DIRECT]
    for name, costs in found.items():
        p50, p99 = _median(costs, "p50"), _median(costs, "p99")
        cells = [name if name != RAY else f"{RAY}, {min(rate, _RAY_RATE):g} requests/s", f"{p50:.2f}", f"{p99:.2f}"]
        if name == DIRECT:
            cells += [""] * 4
        else:
            more50 = statistics.median(each.p50 - other.p50 for each, other in zip(costs, direct, strict=True))
            more99 = statistics.median(each.p99 - other.p99 for each, other in zip(costs, direct, strict=True))
            cells += [f"**{more50:.2f}**", f"**{more99:.2f}**", f"{_median(costs, 'processor'):.2f}"]
            cells += [f"{_median(costs, 'megabytes'):.0f}"]
        lines.append(f"| {' | '.join(cells)} | {sum(each.failed for each in costs)} |")
    return "\n".join(lines) + "\n"


def _median(costs: Sequence[Cost], field: str) -> float:
    return statistics.median(getattr(each, field) for each in costs)


def case_table(case: Case, found: dict[str, list[Result]]) -> str:
    """Return what came of a case."""
    lines = [
        f"**{case.name.capitalize()}**: {case.about}; {case.rate:g} requests/s.\n",
        "| | cached | TTFT p50, ms | p95 | p99 | failed before the first token | cut in the answer "
        "| processor time a request, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, results in found.items():
        cached = statistics.median(each.cached for each in results)
        first = [statistics.median(each.first[place] for each in results) * 1e3 for place in range(3)]
        refused, cut = sum(each.refused for each in results), sum(each.cut for each in results)
        asked = sum(each.asked for each in results)
        processor = statistics.median(each.processor for each in results) * 1e3
        times = " | ".join(f"{each:,.0f}" for each in first)
        lines.append(f"| {name} | {cached:.1%} | {times} | {refused} of {asked} | {cut} | {processor:.2f} |")
    return "\n".join(lines) + "\n"


def by_turns(case: Case, names: Sequence[str], rounds: int, seconds: float) -> dict[str, list[Result]]:
    """Let routers take turns in a case. Ray Serve, which takes half a minute to start, has one."""
    found: dict[str, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names:
            if turn == 0 or name != RAY:
                found[name].append(case_run(name, case, turn, seconds))
                print(f"{case.name}, {name}, round {turn + 1}: {found[name][-1]}"[:300], file=sys.stderr, flush=True)
    return found


def _matching(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    return [each for each in names if not wanted or any(word.lower() in each.lower() for word in wanted)]


def groups(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Measure, and yield sections of the page with their texts. One of which not all was asked has no name."""
    names = _matching(NAMES, given.routers)
    cases = _matching(("cost", "sizes", *(each.name for each in CASES), "openvino", "memory"), given.cases)
    whole = "" if given.routers else "routers "
    on = f"Measured on {machine()}; {given.rounds} round{'s' * (given.rounds > 1)} of {given.seconds:g} s.\n\n"
    if "cost" in cases:
        about = f"{on}{_COST_RATE:g} requests/s of {_COST_TOKENS} tokens.\n\n"
        yield whole and f"{whole}cost", about + cost_table(names, _COST_TOKENS, _COST_RATE, given)
    if "sizes" in cases:
        parts = []
        for tokens, rate in _SIZES:
            about = f"{rate:g} requests/s of {tokens:,} tokens ({tokens * 4:,} bytes).\n\n"
            parts.append(about + cost_table([each for each in names if each != RAY], tokens, rate, given))
        yield whole and f"{whole}sizes", on + "\n".join(parts)
    chosen = [each for each in CASES if each.name in cases]
    if chosen:
        tables = [case_table(case, by_turns(case, names, given.rounds, given.seconds)) for case in chosen]
        yield whole and f"{whole}cases" * (len(chosen) == len(CASES)), on + "\n".join(tables)
    if "openvino" in cases:
        known = [each for each in ROUTERS if each.name in names]
        yield whole and f"{whole}openvino", on + routed_openvino.table(known, given.rounds, given.seconds)
    # It takes as long as much of the others: only if it is named.
    if "memory" in cases and given.cases:
        yield f"{whole}memory", f"Measured on {machine()}.\n\n{memory_table(_router(NAMES[0]), given.prompts)}"


def main() -> None:
    """Measure and report."""
    flags = command_line(__doc__, 12.0, 2)
    flags.add_argument("--cases", nargs="*", default=[], metavar="WORD", help="cases whose name has one of these in it")
    flags.add_argument("--routers", nargs="*", default=[], metavar="WORD", help="routers, likewise")
    flags.add_argument("--prompts", type=int, default=1_000_000, help="of the case memory (default: %(default)s)")
    given = flags.parse_args()
    for section, text in groups(given):
        if section:
            publish(section, text, given)
        else:
            print(text, flush=True)


if __name__ == "__main__":
    main()
