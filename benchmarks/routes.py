"""What a weighted route costs: the same requests to a model, and to routes that lead to it.

    python benchmarks/routes.py [--seconds S] [--rounds N] [--print] [--instructions | --observed]

One server has a model, and names that are only routes to it. It is asked in turn, in another order in every other
round. All weight is on the arm that is the model itself, so the work is the same: "coin" chooses for each request,
"key" by a header field, which all requests have. The processor time is that of the server and its workers for a
request of 64 bytes; "cost" is the median of the differences within a round, in proportion to the time without a route.

--instructions counts what the server executes for a request instead, with callgrind (Debian: valgrind), which is exact
where processor times are not; from one connection, so that no request shares a turn of the loop.

--observed measures what a rollout costs the loop of the server, in loops without a server: each request that is
observed, and each look at the evidence. It has four gates and requests of three sizes, a tenth of which go to the
candidate, after six changes of the weights.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Final

from before import counted, family
from contestants import Contestant, identity_repository, nerite
from curves import ASLEEP
from loads import need, write_bodies, wrk
from page import command_line, machine, publish

from nerite.config.rollout_spec import RolloutSpec
from nerite.core.request import Assignment, InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse
from nerite.judge.outcome import Outcome, token_stratum
from nerite.rollouts.run import RolloutRun
from nerite.routes.observation import ObservedSink, StrataOfHeader
from nerite.routes.table import RouteState

CONNECTIONS = 32
TARGETS = {"no route": "identity", "coin": "coin", "key": "keyed"}
"""What is asked, by its name in the tables."""
GATES: Final = ("errors", "p99=+10%", "ttft_p95=+10%", "itl=+10%")
STEPS: Final = 6
REQUESTS: Final = 2048
"""In a round."""
UNDER_WAY: Final = 1000
SECOND: Final = 1_000_000_000
STRATA: Final = [token_stratum(f"<{4**size} B", "", "", False) for size in (4, 5, 6)]
LIMIT = 0.02
"""Share of the processor time of a small request that a route may cost."""
ROUTE = """
[[arm]]
model = "identity"
weight = 1
[[arm]]
model = "other"
weight = 0
"""


def write_repository(folder: Path, *, in_process: bool) -> Path:
    """Write the model, another one that gets nothing, and the routes."""
    models = identity_repository(folder, in_process=in_process)
    (models / "other" / "1").mkdir(parents=True)
    for file in ("config.pbtxt", "1/model.py"):
        text = (models / "identity" / file).read_text()
        (models / "other" / file).write_text(text.replace('"identity"', '"other"'))
    for name, keys in (("coin", ""), ("keyed", 'sticky = ["header:x-user"]\n')):
        (models / name).mkdir()
        (models / name / "route.toml").write_text(keys + ROUTE)
    return models


def spent_ns(server: Contestant) -> int:
    """Return the nanoseconds of processor time that a server and its workers have used."""
    total = 0
    for process in family(server.process.pid):
        for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
            try:
                total += int(file.read_text().split()[0])
            except OSError:
                continue
    return total


def measure(server: Contestant, folder: Path, target: str, seconds: float) -> float:
    """Return the microseconds of processor time of the server for a request."""
    before = spent_ns(server)
    pace = wrk(folder, "keyed", CONNECTIONS, seconds, TARGETS[target])(server)
    return (spent_ns(server) - before) / 1e3 / (pace.rate * seconds)


def rows(seconds: float, rounds: int) -> Sequence[str]:
    """Measure, and return the rows of the table."""
    made = []
    for place, in_process in (("worker", False), ("in process", True)):
        with ExitStack() as opened:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            write_requests(folder)
            repository = write_repository(folder, in_process=in_process)
            server = opened.enter_context(nerite("nerite", repository, folder, ASLEEP))
            found: dict[str, list[float]] = {target: [] for target in TARGETS}
            for target in TARGETS:
                measure(server, folder, target, 1.0)
            for number in range(rounds):
                order = list(TARGETS) if number % 2 else [*reversed(TARGETS)]
                for target in order:
                    found[target].append(measure(server, folder, target, seconds))
                print(place, number, {target: round(times[-1], 2) for target, times in found.items()}, file=sys.stderr)
        direct = found["no route"]
        for target, times in found.items():
            more = statistics.median(time - base for time, base in zip(times, direct, strict=True))
            share = more / statistics.median(direct)
            cost = "" if target == "no route" else f"{more:.2f} us | **{share:.1%}**{' (too much)' * (share > LIMIT)}"
            made.append(f"| {place} | {target} | {statistics.median(times):.2f} us | {cost or '| '} |")
    return made


def counted_rows(seconds: float, rounds: int) -> Sequence[str]:
    """Count the instructions of a server for a request, and return the rows of the table."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        write_requests(folder)
        repository = write_repository(folder, in_process=True)
        written = folder / "callgrind"
        under = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={written}"]
        server = opened.enter_context(nerite("counted", repository, folder, ASLEEP, under=under))
        found: dict[str, list[float]] = {target: [] for target in TARGETS}
        for number in range(rounds + 1):  # the first warms it up
            for target, model in TARGETS.items():
                counted(server, written)
                requests = wrk(folder, "keyed", 1, seconds, model)(server).rate * seconds
                if number:
                    found[target].append(counted(server, written) / requests)
    direct = statistics.median(found["no route"])
    rows = []
    for target, counts in found.items():
        count = statistics.median(counts)
        cost = "" if target == "no route" else f"{count - direct:,.0f} | **{count / direct - 1:.1%}**"
        rows.append(f"| in process | {target} | {count:,.0f} | {cost or '| '} |")
    return rows


def write_requests(folder: Path) -> None:
    """Write the request, which has a key whether it is used or not."""
    write_bodies(folder)
    (folder / "keyed.lua").write_text((folder / "small.lua").read_text() + 'wrk.headers["X-User"] = "someone"\n')


class Nobody:
    """A caller that does not look at the answers."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Do nothing."""


class Waiting:
    """A request that is under way."""

    counted = 0

    def __init__(self, arrived_ns: int) -> None:
        self.arrived_ns = arrived_ns

    def outcome(self, now_ns: int) -> Outcome:
        """Return what it would be if it ended now."""
        age = (now_ns - self.arrived_ns) / 1e3
        return Outcome(False, 0.1, now_ns, age, age, 0.0, "", STRATA[0])


class Stream:
    """Outcomes, half a millisecond apart."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._random = Random(1)

    def take(self, count: int) -> list[Outcome]:
        """Return the next ones."""
        random, made = self._random, []
        for _ in range(count):
            self.now_ns += 500_000
            latency = random.lognormvariate(9, 0.5)
            error = "error" if random.random() < 0.002 else ""
            candidate, stratum = random.random() < 0.1, random.choice(STRATA)
            first, token = latency * 0.4, random.lognormvariate(6, 0.3)
            made.append(Outcome(candidate, 0.1, self.now_ns, latency, first, token, error, stratum))
        return made


def spent_us(work: Callable[[], object]) -> float:
    """Return the processor time of a call, in microseconds."""
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1e3


def observed_rows(rounds: int) -> list[str]:
    """Measure what a rollout costs the loop, and return the rows of the table."""
    stream = Stream()
    run = RolloutRun("m", "1", RolloutSpec("2", "1", (10.0, 100.0), gates=GATES), "")
    run.rollout.begin(0)
    for _ in range(STEPS):
        run.begin_step(stream.now_ns)
        for outcome in stream.take(REQUESTS):
            run.observe(outcome)
    state = RouteState(run.route())
    header = RequestHeader("m", "", [])
    strata, nobody = StrataOfHeader(header), Nobody()
    assignment = Assignment("m", "m:1", False, 0.1, 0)
    found: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], object], count: int = 1) -> None:
        found.setdefault(name, []).append(spent_us(work) / count)

    def observe(outcomes: list[Outcome]) -> None:
        take = run.observe
        for outcome in outcomes:
            take(outcome, 0)
        run.judge.count()

    def measure(requests: list[InferenceRequest]) -> None:
        for request in requests:
            ObservedSink(request, assignment, state, ignore, strata.of(request))
            request.sink.respond(request, EMPTY, True)

    def ignore(_outcome: Outcome, _counted: int) -> None:
        pass

    def fresh() -> list[Waiting]:
        return [Waiting(stream.now_ns - number) for number in range(UNDER_WAY)]

    for _ in range(rounds):
        requests = [InferenceRequest(header, [b"x"], nobody, time.monotonic_ns()) for _ in range(REQUESTS)]
        note("a request: its latencies are measured", lambda these=requests: measure(these), REQUESTS)
        outcomes = stream.take(REQUESTS)
        note("a request: its outcome is counted", lambda these=outcomes: observe(these), REQUESTS)
        note("each second: the evidence", lambda: run.findings(stream.now_ns))
        waiting = fresh()
        note(
            f"each second: {UNDER_WAY:,} requests under way, none late",
            lambda those=waiting: run.look_under_way(those, stream.now_ns),
        )
        note("a status, with all intervals", run.status)
        run.verdict = run.judge.verdict(stream.now_ns)
        note("each ten seconds: the state that is saved", run.as_json)
    return [f"| {name} | {min(times):,.1f} us |" for name, times in found.items()]


def report(seconds: float, rounds: int, *, instructions: bool = False) -> str:
    """Return the section of the page."""
    need("wrk", *(["valgrind"] if instructions else []))
    lines = [
        f"Measured on {machine()}; {rounds} rounds of {seconds:g} s each.",
        "",
        f"| model | requests go | {'instructions' if instructions else 'processor time'} | more | cost |",
        "|---|---|---|---|---|",
        *(counted_rows if instructions else rows)(seconds, rounds),
    ]
    return "\n".join(lines) + "\n"


def observed_report(rounds: int) -> str:
    """Return the section of the page about rollouts."""
    lines = [f"Measured on {machine()}; the least of {rounds} rounds.", "", "| | processor time |", "|---|---|"]
    return "\n".join([*lines, *observed_rows(rounds)]) + "\n"


if __name__ == "__main__":
    flags = command_line(__doc__, 2.0, 5)
    flags.add_argument("--instructions", action="store_true", help="count instructions instead of time")
    flags.add_argument("--observed", action="store_true", help="measure what a rollout costs the loop instead")
    given = flags.parse_args()
    if given.observed:
        publish("routes observed", observed_report(given.rounds), given)
    else:
        name = "routes instructions" if given.instructions else "routes"
        publish(name, report(given.seconds, given.rounds, instructions=given.instructions), given)
