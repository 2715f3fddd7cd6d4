"""What counting costs a small request: the histograms of its stages, on and off, and the counting by itself.

    python benchmarks/counting.py [--seconds S] [--rounds N] [--print]

An identity in process is asked by wrk. Two servers run, one with `--metrics-config=stage_histograms=false`, and are
asked in turn, each first in every other round. The figure is the processor time that the server takes for a request,
which others on the machine hardly change: the median of the rounds, and of the differences within a round.
"""

from __future__ import annotations

import statistics
import tempfile
import timeit
from contextlib import ExitStack
from pathlib import Path

from contestants import Contestant, identity_repository, nerite
from loads import need, write_bodies, wrk
from page import bring_up_to_date, machine

from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import NOBODY, InferenceRequest, RequestHeader
from nerite.observability.histogram import StageTimes
from nerite.observability.statistics import VersionStatistics

_CALLS = 20_000


def by_itself(size: int, stages: StageTimes | None) -> float:
    """Return the nanoseconds that it takes to count one request of a batch of ``size``."""
    header = RequestHeader("identity", "", ())
    batch = [InferenceRequest(header, (), NOBODY, place) for place in range(size)]
    marks = ExecutionTimes()
    marks.started_ns, marks.inputs_ready_ns, marks.computed_ns, marks.ended_ns = 60_000, 61_000, 90_000, 92_000
    of = VersionStatistics(stages)
    took = min(timeit.repeat(lambda: of.executed(batch, marks, 120_000), number=_CALLS, repeat=9))
    return took / _CALLS / size * 1e9


def spent(server: Contestant) -> int:
    """Return the nanoseconds of processor time that a server has used so far."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


def whole(seconds: float, rounds: int, connections: int) -> tuple[float, float, float]:
    """Return the microseconds that a request takes with histograms and without, and what they cost, in percent."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        write_bodies(folder)
        repository = identity_repository(folder, in_process=True)
        on = running.enter_context(nerite("on", repository, folder))
        off = running.enter_context(nerite("off", repository, folder, "--metrics-config=stage_histograms=false"))
        load = wrk(folder, "small", connections, seconds)
        for server in (on, off):
            load(server)
        took: dict[str, list[float]] = {"on": [], "off": []}
        for number in range(rounds):
            for server in (on, off) if number % 2 else (off, on):
                before = spent(server)
                requests = load(server).rate * seconds
                took[server.name].append((spent(server) - before) / requests / 1000)
    costs = [100 * (with_ / without - 1) for with_, without in zip(took["on"], took["off"], strict=True)]
    return statistics.median(took["on"]), statistics.median(took["off"]), statistics.median(costs)


def report(seconds: float, rounds: int) -> str:
    """Measure everything; return the section of the page."""
    need("wrk")
    lines = [
        f"Measured on {machine()}; {rounds} rounds of {seconds:g} s.",
        "",
        "| connections | a request with histograms | without | cost |",
        "|---|---|---|---|",
    ]
    for connections in (16, 64):
        on, off, cost = whole(seconds, rounds, connections)
        lines.append(f"| {connections} | {on:.2f} us | {off:.2f} us | **{cost:+.1f} %** |")
    lines += ["", "| requests in a batch | counting without histograms | with |", "|---|---|---|"]
    for size in (1, 8, 32):
        without, with_ = by_itself(size, None), by_itself(size, StageTimes())
        lines.append(f"| {size} | {without:.0f} ns a request | {with_:.0f} ns |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    bring_up_to_date("counting", __doc__, report, 2)
