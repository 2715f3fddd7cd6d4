"""A language model of which more is asked than it can do: three tenants, three classes, twice and five times its peak.

The peak is that of 48 streams that each ask for the next answer when they have one, measured on the same server before
each run and after it. In between requests come at random moments, whatever comes back. An answer is of use if it came
within the time of its class: the first token of the upper two, the whole answer of the least. What the client was told
and what the server has counted are compared in the end, to the last request and token.

    python benchmarks/llm_overload.py [--seconds S] [--times N ...] [--print]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import llm_checkpoint
from contestants import Contestant, nerite
from footprint import descendants, own
from llm_checkpoint import Prompts
from llm_crowd import ANSWERS, SEQUENCES, policy, requests, unhurried
from llm_overload_tables import BLOCKS, Run, of_classes, of_runs, of_tenants
from page import machine, publish
from token_crowd import Answer, Asked, at_a_rate, at_capacity

from nerite.backends.interface import ModelContext
from nerite.llm import installation

Counts: TypeAlias = dict[tuple[str, str], Counter[str]]

_SIZE: Final = "30M"
_PEAK_STREAMS: Final = 48
_PEAK_SECONDS: Final = 20.0
_WARM_SECONDS: Final = 5.0
"""At the beginning of that, which do not count."""
_CONFIG: Final = f"""
backend: "llm"
parameters [
  {{ key: "MAX_NUM_SEQS" value {{ string_value: "{SEQUENCES}" }} }},
  {{ key: "NUM_KV_BLOCKS" value {{ string_value: "{BLOCKS}" }} }}
]
"""


class Watch(threading.Thread):
    """Reads every half second how much KV memory is in use."""

    def __init__(self, server: Contestant) -> None:
        super().__init__(daemon=True)
        self._page = f"http://127.0.0.1:{server.metrics}/metrics"
        self._over = threading.Event()
        self.most = 0

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Read until it is over."""
        while not self._over.wait(0.5):
            with urllib.request.urlopen(self._page) as page:
                lines = page.read().decode().splitlines()
            used = [line for line in lines if line.startswith("nerite_llm_kv_blocks{") and 'state="used"' in line]
            self.most = max(self.most, *(int(float(line.rpartition(" ")[2])) for line in used))


def peak(server: Contestant, asks: Iterator[Asked]) -> float:
    """Return the tokens a second of answers when somebody always waits."""
    began, answers = at_capacity(server.http, unhurried(asks), _PEAK_STREAMS, _PEAK_SECONDS)
    counted = [each for each in answers if _WARM_SECONDS <= each.ended - began < _PEAK_SECONDS]
    return sum(each.tokens for each in counted) / (_PEAK_SECONDS - _WARM_SECONDS)


def run(
    server: Contestant, asks: Iterator[Asked], highest: float, times: float, seconds: float, chance: random.Random
) -> Run:
    """Ask for ``times`` the peak; measure that again."""
    before = _counted(server)
    with Watch(server) as watch:
        rate = times * highest / (sum(ANSWERS) / 2)
        began, answers = at_a_rate(server.http, asks, rate, seconds, chance)
    differences = _differences(answers, before, _counted(server))
    return Run(times, highest, peak(server, asks), began, answers, watch.most, differences)


def _counted(server: Contestant) -> Counts:
    """Return what the server has counted, by tenant and class."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/quota") as page:
        uses = json.load(page)["use"]
    found = {}
    for use in uses:
        counts = found[use["tenant"], use["class"]] = Counter[str]()
        for name, value in use.items():
            if isinstance(value, dict):
                counts.update({f"{name} {reason}": count for reason, count in value.items()})
            elif isinstance(value, int):
                counts[name] = value
    return found


def _differences(answers: Sequence[Answer], before: Counts, after: Counts) -> list[str]:
    """Return where the server's counts are others than the client's."""
    found = []
    for key, there in after.items():
        there.subtract(before.get(key, {}))
        asked = [each for each in answers if (each.asked.tenant, each.asked.level) == key]
        complete = [each for each in asked if not each.limit]
        here = Counter(f"refused {each.limit}" for each in asked if each.limit)
        here["offered"] = len(asked)
        here["finished complete"] = len(complete)
        here["finished_tokens complete"] = sum(each.tokens for each in complete)
        # Who ran at the deadline is told the same as who waited.
        cut = there.pop("finished deadline", 0)
        there["refused deadline"] += cut
        if not cut:
            here["input_tokens"] = sum(each.asked.prompt for each in complete)
        names = {*here, *(name for name in there if name.startswith("refused"))}
        found += [
            f"{' '.join(key)}: {name}: {here[name]}, {there[name]}" for name in names if here[name] != there[name]
        ]
    return found


class Memory:
    """Of the server and of its workers, at moments."""

    def __init__(self, server: Contestant) -> None:
        self._pid = server.process.pid
        self._lines = ["| | server | engine |", "|---|---|---|"]

    def note(self, when: str) -> None:
        """Read how much it is now."""
        engine = sum(map(own, descendants(self._pid)))
        self._lines.append(f"| {when} | {own(self._pid):.1f} MB | {engine:.1f} MB |")

    def __str__(self) -> str:
        return "\n".join(self._lines)


def main() -> None:
    """Measure and report."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--seconds", type=float, default=300, help="of each run (default: %(default)g)")
    flags.add_argument("--times", type=float, nargs="+", default=[2, 5], help="the peak (default: 2 5)")
    flags.add_argument("--print", action="store_true", help="print the tables and leave the page alone")
    given = flags.parse_args()
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = folder / "models" / _SIZE
        llm_checkpoint.write(_SIZE, model / "1")
        (model / "config.pbtxt").write_text(_CONFIG)
        (folder / "policy.toml").write_text(policy())
        installation.converted(ModelContext(_SIZE, 1, model, {}))
        asks = requests(_SIZE, Prompts(model / "1"), chance)
        with nerite("Nerite", folder / "models", folder, f"--policy-file={folder / 'policy.toml'}") as server:
            highest = peak(server, asks)
            memory, runs = Memory(server), []
            memory.note("after the peak")
            for times in given.times:
                alarm = threading.Timer(given.seconds / 2, memory.note, [f"in the middle of {times:g} x"])
                alarm.start()
                runs.append(run(server, asks, highest, times, given.seconds, chance))
                memory.note(f"after {times:g} x")
                highest = runs[-1].peak_after
    for each in runs:
        for difference in each.differences:
            print(f"{each.times:g} x: {difference}")
    parts = [
        f"Measured on {machine()}; {given.seconds:g} s each.",
        of_runs(runs, given.seconds),
        of_classes(runs),
        of_tenants(runs, given.seconds),
        str(memory),
    ]
    publish("llm overload", "\n\n".join(parts) + "\n", given)


if __name__ == "__main__":
    main()
