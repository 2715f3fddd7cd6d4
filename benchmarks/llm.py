"""Language models through the server, beside the bare engine: the same requests, at the same time, by turns.

Kinds of requests: ``128/64`` (tokens of the prompt, tokens of the answer), ``mixed`` (16 to 1,024, 8 to 256),
``prefix`` (512 that all have in common and 64 of their own, 64), and ``8000/16``, which is only measured if it is
named. So many streams each ask for the next answer when they have one. The bare engine has the tokens and gives
tokens: no text, no socket, no other process.

    python benchmarks/llm.py [--rounds N] [--only MODEL ...] [--workloads W ...] [--streams N ...] [--each N]
                             [--threads N] [--print]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import llm_checkpoint
from bare_engine import bare_engine
from contestants import nerite
from llm_checkpoint import SIZES, Prompts
from page import machine, write
from token_client import APIS, Figures, Request, medians, run

from nerite.backends.interface import ModelContext
from nerite.llm import installation

WORKLOADS = ("128/64", "mixed", "prefix")
LONG = "8000/16"
STREAMS = (1, 8, 32)
_CONFIGURATION = """backend: "llm"
parameters {{ key: "INFERENCE_NUM_THREADS" value {{ string_value: "{}" }} }}
"""


class Row(NamedTuple):
    """Medians of a cell."""

    model: str
    workload: str
    streams: int
    api: str
    bare: Figures
    heard: Figures
    served: Figures
    ratio: float


def requests(workload: str, prompts: Prompts, count: int, random: random.Random) -> list[Request]:
    """Return so many requests of a kind."""
    if workload == "mixed":
        lengths = [(random.randint(16, 1024), random.randint(8, 256)) for _ in range(count)]
        return [(prompts.take(given), wanted) for given, wanted in lengths]
    if workload == "prefix":
        prefix = prompts.take(512)
        return [(prefix + prompts.take(64), 64) for _ in range(count)]
    if workload == LONG:
        return [(prompts.take(8000), 16) for _ in range(count)]
    return [(prompts.take(128), 64) for _ in range(count)]


def measured(size: str, checkpoint: Path, folder: Path, given: argparse.Namespace) -> Iterator[Row]:
    """Let the bare engine and the server take turns."""
    prompts = Prompts(checkpoint)
    files = installation.converted(ModelContext(size, 1, checkpoint.parent, {}))
    (checkpoint.parent / "config.pbtxt").write_text(_CONFIGURATION.format(given.threads))
    with bare_engine(files, given.threads) as bare, nerite("Nerite", folder / "models", folder) as server:
        for workload in given.workloads:
            for streams in given.streams:
                figures: dict[str, list[Figures]] = {"bare": [], "heard": []} | {api: [] for api in APIS}
                for turn in range(given.rounds + 1):
                    # Of the same lengths in a turn, but none comes twice: what was computed once is kept.
                    for name, taken in figures.items():
                        count = given.each * max(streams, 2) if turn else max(streams, 4)
                        asked = requests(workload, prompts, count, random.Random(turn))
                        if name in ("bare", "heard"):
                            file = folder / "requests.json"
                            llm_checkpoint.save(asked, prompts, file)
                            taken.append(bare.run(file, streams, heard=name == "heard"))
                        else:
                            taken.append(run(server.http, name, size, asked, streams))
                for taken in figures.values():
                    del taken[0]  # to warm up
                for api in APIS:
                    pairs = zip(figures[api], figures["bare"], strict=True)
                    ratio = statistics.median(served.tokens / engine.tokens for served, engine in pairs)
                    alone, heard = medians(figures["bare"]), medians(figures["heard"])
                    yield Row(size, workload, streams, api, alone, heard, medians(figures[api]), ratio)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as they stand on the page."""
    lines = [
        "| model | requests | streams | bare engine, tokens/s | to the first token, ms | between two, ms "
        "| heard of, ms more | asked by | served, tokens/s | ratio | first token, ms more | between two, ms more |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bare, served = row.bare, row.served
        lines.append(
            f"| {row.model} | {row.workload} | {row.streams} | {bare.tokens:,.0f} | {bare.first:.1f} "
            f"| {bare.between:.2f} | {row.heard.between - bare.between:.2f} | {row.api} | {served.tokens:,.0f} "
            f"| **{row.ratio:.2f}** | {served.first - bare.first:.1f} | {served.between - bare.between:.2f} |"
        )
    return "\n".join(lines) + "\n"


def flags(about: str | None) -> argparse.ArgumentParser:
    """Return what measurements of language models can be told."""
    arguments = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    arguments.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES), metavar="MODEL")
    arguments.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    arguments.add_argument("--print", action="store_true", help="print the table instead of writing the page")
    return arguments


def main() -> None:
    """Measure, and write the page."""
    arguments = flags(__doc__)
    arguments.add_argument(
        "--workloads", nargs="+", choices=(*WORKLOADS, LONG), default=list(WORKLOADS), metavar="WORKLOAD"
    )
    arguments.add_argument("--each", type=int, default=2, help="answers that each stream reads in a turn (2)")
    cores = len(os.sched_getaffinity(0))
    arguments.add_argument("--threads", type=int, default=cores, help=f"for the framework, in both ({cores})")
    given = arguments.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for size in given.only:
            folder = Path(directory) / size
            checkpoint = folder / "models" / size / "1"
            llm_checkpoint.write(size, checkpoint)
            rows += measured(size, checkpoint, folder, given)
    threads = f", {given.threads} of them for the framework" if given.threads != cores else ""
    text = f"Measured on {machine()}{threads}; {given.rounds} turns.\n\n{table(rows)}"
    if given.print:
        print(text)
    else:
        write("llm", text)


if __name__ == "__main__":
    main()
