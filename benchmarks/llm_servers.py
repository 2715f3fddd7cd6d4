"""Language models in Nerite and in vLLM's own OpenAI server, from one checkpoint: the same requests, by turns.

Nerite runs them on OpenVINO GenAI, its engine for processors; vLLM is its build for processors, in the environment that
``nerite engines install vllm`` makes (2.2 GB). Both are up all the time, and asked for completions at ``/v1`` in turns.

    python benchmarks/llm_servers.py [--rounds N] [--only MODEL ...] [--streams N ...] [--print]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import llm_checkpoint
from contestants import free_ports, nerite, stopped, wait_ready
from llm import flags, requests
from llm_checkpoint import Prompts
from page import machine, publish
from token_client import Figures, medians, run

from nerite.backends.python import environments
from nerite.llm import installation

_API = "/v1/completions"
_START_SECONDS = 240.0


class Row(NamedTuple):
    """Medians of a cell."""

    model: str
    streams: int
    ours: Figures
    theirs: Figures
    ratio: float


@contextmanager
def vllm_server(model: str, checkpoint: Path, folder: Path) -> Iterator[int]:
    """Run vLLM's server, and give its port."""
    python = installation.made(installation.vllm(), environments.environments_folder(""))
    port = free_ports()[0]
    cores = os.sched_getaffinity(0)
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # Of itself it leaves one free.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(cores))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--served-model-name", model]
    command += ["--dtype", _precision()]
    log = folder / "vllm.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    with stopped(process):
        wait_ready(port, process, log, "health", _START_SECONDS)
        yield port


def _precision() -> str:
    """Return what vLLM is fastest with for several: the checkpoints' bfloat16 only where the processor knows it."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def measured(size: str, folder: Path, given: argparse.Namespace) -> Iterator[Row]:
    """Let the two servers take turns."""
    checkpoint = folder / "models" / size / "1"
    llm_checkpoint.write(size, checkpoint)
    prompts, chance = Prompts(checkpoint), random.Random(0)
    with nerite("Nerite", folder / "models", folder) as server, vllm_server(size, checkpoint, folder) as port:
        for streams in given.streams:
            taken: dict[int, list[Figures]] = {server.http: [], port: []}
            for turn in range(given.rounds + 1):
                # Other prompts in each turn: what was computed once is kept.
                for place, figures in taken.items():
                    asked = requests("128/64", prompts, 2 * max(streams, 2) if turn else max(streams, 4), chance)
                    figures.append(run(place, _API, size, asked, streams))
            ours, theirs = (figures[1:] for figures in taken.values())  # without the first, to warm up
            ratio = statistics.median(our.tokens / their.tokens for our, their in zip(ours, theirs, strict=True))
            yield Row(size, streams, medians(ours), medians(theirs), ratio)


def table(rows: list[Row]) -> str:
    """Return the rows as they stand on the page."""
    lines = [
        "| model | streams | Nerite, tokens/s | to the first token, ms | between two, ms "
        "| vLLM, tokens/s | to the first token, ms | between two, ms | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model, streams, ours, theirs, ratio in rows:
        cells = [f"{each.tokens:,.0f} | {each.first:.0f} | {each.between:.1f}" for each in (ours, theirs)]
        lines.append(f"| {model} | {streams} | {cells[0]} | {cells[1]} | **{ratio:.2f}** |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the page."""
    given = flags(__doc__).parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for size in given.only:
            rows += measured(size, Path(directory) / size, given)
    text = f"Measured on {machine()}; prompts of 128 tokens, answers of 64, {given.rounds} turns.\n\n{table(rows)}"
    publish("llm servers", text, given)


if __name__ == "__main__":
    main()
