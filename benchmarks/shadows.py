"""What callers notice of a shadow: latencies at a steady rate without a shadow, and with good and with bad ones.

    python benchmarks/shadows.py [--seconds S] [--rounds N] [--rate R] [--print]

One server has the same model under several names: without a route, with one, and with routes whose shadow gets a share
of the requests. Requests come at random times, whatever comes back, and each name is asked in turn. Shadow and model
share the processors, so a shadow that computes takes time from callers; one that waits or has died does not.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from contestants import ASLEEP, Contestant, identity_repository, nerite
from page import command_line, machine, publish

_COMPUTES = "    def execute(self, requests):\n"
_BAD = {
    "hangs": "        import time\n        time.sleep(3600)\n",
    "crashes": "        import os\n        os._exit(1)\n",
}
ROUTE = '[[arm]]\nmodel = "identity"\nweight = 1\n'
SHADOW = '[shadow]\nmodel = "{}"\nshare = "{}%"\ntimeout = 1\n'
NAMES = {
    "identity": ("no route", ""),
    "route": ("route", ROUTE),
    "ten": ("shadow, 10 %", ROUTE + SHADOW.format("good", 10)),
    "all": ("shadow, 100 %", ROUTE + SHADOW.format("good", 100)),
    "hanging": ("shadow that hangs, 100 %", ROUTE + SHADOW.format("hangs", 100)),
    "crashing": ("shadow that crashes, 100 %", ROUTE + SHADOW.format("crashes", 100)),
}


def write_repository(folder: Path) -> Path:
    """Write the model, the models that are shadows, and the routes."""
    models = identity_repository(folder)
    for name in ("good", *_BAD):
        (models / name / "1").mkdir(parents=True)
        config = (models / "identity" / "config.pbtxt").read_text()
        (models / name / "config.pbtxt").write_text(config.replace('"identity"', f'"{name}"'))
        model = (models / "identity" / "1" / "model.py").read_text()
        (models / name / "1" / "model.py").write_text(model.replace(_COMPUTES, _COMPUTES + _BAD.get(name, "")))
    for name, (_, route) in NAMES.items():
        if route:
            (models / name).mkdir()
            (models / name / "route.toml").write_text(route)
    return models


def measure(server: Contestant, folder: Path, model: str, rate: float, seconds: float) -> dict[str, float]:
    """Return quantiles of the latency in milliseconds, and the number of requests that failed."""
    written = folder / "figures.json"
    command = [str(Path(sys.executable).with_name("nerite")), "bench", model, f"--url=127.0.0.1:{server.http}"]
    load = [
        f"--rate={rate:g}",
        "--poisson",
        "--shape=INPUT0:16",
        "--warm-up=0.5",
        "--windows=1",
        f"--window={seconds:g}",
    ]
    subprocess.run([*command, *load, f"--json={written}"], check=True, stdout=subprocess.DEVNULL)
    (level,) = json.loads(written.read_text())["levels"]
    return {**level["latency_ms"], "failed": level["failed"]}


def rows(rate: float, seconds: float, rounds: int) -> Sequence[str]:
    """Measure, and return the rows of the table."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        server = opened.enter_context(
            nerite("shadows", write_repository(folder), folder, ASLEEP, "--exit-timeout-secs=1")
        )
        found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
        for number in range(rounds):
            for name in list(NAMES)[:: -1 if number % 2 else 1]:
                found[name].append(measure(server, folder, name, rate, seconds))
            print({name: round(each[-1]["p99"], 2) for name, each in found.items()}, file=sys.stderr)
    made = []
    for name, each in found.items():
        middle = [statistics.median(figures[quantile] for figures in each) for quantile in ("p50", "p90", "p99")]
        failed = sum(figures["failed"] for figures in each)
        made.append(f"| {NAMES[name][0]} | {' | '.join(f'{value:.2f}' for value in middle)} | {failed:.0f} |")
    return made


def report(rate: float, seconds: float, rounds: int) -> str:
    """Return the section of the page."""
    lines = [
        f"Measured on {machine()}; {rate:g} requests a second at random times; medians of {rounds} rounds of "
        f"{seconds:g} s.",
        "",
        "| | p50 ms | p90 ms | p99 ms | failed |",
        "|---|---|---|---|---|",
        *rows(rate, seconds, rounds),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    flags = command_line(__doc__, 5.0, 5)
    flags.add_argument("--rate", type=float, default=300.0, help="requests per second (default: %(default)g)")
    given = flags.parse_args()
    publish("shadows", report(given.rate, given.seconds, given.rounds), given)
