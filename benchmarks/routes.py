"""What a weighted route costs: the same requests to a model, and to routes that lead to it.

    python benchmarks/routes.py [--seconds S] [--rounds N] [--print] [--instructions]

One server has a model, and names that are only routes to it. It is asked in turn, in another order in every other
round. All weight is on the arm that is the model itself, so the work is the same: "coin" chooses for each request,
"key" by a header field, which all requests have. The processor time is that of the server and its workers for a
request of 64 bytes; "cost" is the median of the differences within a round, in proportion to the time without a route.

--instructions counts what the server executes for a request instead, with callgrind (Debian: valgrind), which is exact
where processor times are not; from one connection, so that no request shares a turn of the loop.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from before import counted, family
from contestants import Contestant, identity_repository, nerite
from curves import ASLEEP
from loads import need, write_bodies, wrk
from page import command_line, machine, publish

CONNECTIONS = 32
TARGETS = {"no route": "identity", "coin": "coin", "key": "keyed"}
"""What is asked, by its name in the tables."""
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


if __name__ == "__main__":
    flags = command_line(__doc__, 2.0, 5)
    flags.add_argument("--instructions", action="store_true", help="count instructions instead of time")
    given = flags.parse_args()
    name = "routes instructions" if given.instructions else "routes"
    publish(name, report(given.seconds, given.rounds, instructions=given.instructions), given)
