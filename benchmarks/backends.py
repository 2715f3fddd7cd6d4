"""Frameworks under saturation: rows a second through the server, beside a bare loop of the same framework.

For each cell (a framework, a model, a batch size) the server gets more requests than it can do, of two kinds:

- ``whole``:  each request carries a batch;
- ``joined``: each request carries one row, and the dynamic batcher makes the batches.

The bare loop runs in a process of its own, with as many threads as the one instance has, one, on a batch that is ready,
its results thrown away. Loop and server take turns; a ratio is the median of those of each turn. The load is ``wrk``,
over HTTP with binary tensors. Before that, the server's answer is compared with the loop's.

    python benchmarks/backends.py [--seconds S] [--rounds N] [--only CONTESTANT ...] [--models MODEL ...] [--print]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tritonclient.http
from bare_loop import bare_loop
from contestants import Contestant, nerite
from loads import need, write_http, wrk
from page import command_line, machine, publish
from zoo import CONTESTANTS
from zoo.contestant import ROWS, rows

_SERVED = """
max_batch_size: {batch}
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
_CONNECTIONS = 256
"""At most, for requests of one row."""


class Rates(NamedTuple):
    """Medians, in rows a second, and of the ratios of each turn."""

    contestant: str
    model: str
    batch: int
    bare: float
    whole: float
    joined: float
    whole_ratio: float
    joined_ratio: float


def written(name: str, model: str, folder: Path) -> Path:
    """Write the version of a model, in a process of its own, and return its folder."""
    version = folder / model / "1"
    version.mkdir(parents=True)
    program = "import sys, pathlib, zoo; zoo.CONTESTANTS[sys.argv[1]].write(sys.argv[2], pathlib.Path(sys.argv[3]))"
    _run("-c", program, name, model, version)
    return version


def _run(*arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


def measure(name: str, version: Path, batch: int, seconds: int, rounds: int) -> Rates:
    """Serve one model, and let the loop and the two kinds of requests take turns."""
    contestant, model = CONTESTANTS[name], version.parent.name
    (version.parent / "config.pbtxt").write_text(contestant.config(model) + _SERVED.format(batch=batch))
    given = rows(model, batch)
    rates: dict[str, list[float]] = {"bare": [], "whole": [], "joined": []}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_http(folder, "whole", (contestant.input, list(given.shape), given.tobytes()), contestant.output)
        write_http(folder, "joined", (contestant.input, [1, *ROWS[model]], given[:1].tobytes()), contestant.output)
        answer = folder / "answer.npy"
        with nerite("Nerite", version.parents[1], folder) as server, bare_loop(name, version, batch, answer) as loop:
            compare(server, name, model, batch, np.load(answer))
            # Two or three batches in the server at any time: one computes, the next is ready when it ends.
            whole = wrk(folder, "whole", 3, seconds, model)
            joined = wrk(folder, "joined", min(3 * batch, _CONNECTIONS), seconds, model)
            for _ in range(rounds):
                rates["bare"].append(loop.rate(seconds))
                rates["whole"].append(whole(server).rate * batch)
                rates["joined"].append(joined(server).rate)
    turns = list(zip(rates["bare"], rates["whole"], rates["joined"], strict=True))
    ratios = [statistics.median(turn[kind] / turn[0] for turn in turns) for kind in (1, 2)]
    return Rates(name, model, batch, *(statistics.median(each) for each in rates.values()), *ratios)


def compare(server: Contestant, name: str, model: str, batch: int, expected: np.ndarray) -> None:
    """Exit unless the server computes what the framework does."""
    given = tritonclient.http.InferInput(CONTESTANTS[name].input, [batch, *ROWS[model]], "FP32")
    given.set_data_from_numpy(rows(model, batch))
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        answer = client.infer(model, [given]).as_numpy(CONTESTANTS[name].output)
    # Libraries of trees leave out the class that is the rest.
    if not np.allclose(answer.reshape(batch, -1)[:, -1], expected.reshape(batch, -1)[:, -1], rtol=1e-3, atol=1e-4):
        sys.exit(f"{server.name} computes otherwise than {name}")


def table(found: list[Rates]) -> str:
    """Return the table."""
    lines = [
        "| framework | model | batch | bare loop, rows/s | whole batches | ratio | joined rows | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, model, batch, loop, whole, joined, *ratios in found:
        cells = f"{whole:,.0f} | **{ratios[0]:.2f}** | {joined:,.0f} | **{ratios[1]:.2f}**"
        lines.append(f"| {name} | {model} | {batch} | {loop:,.0f} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__, 2, 5)
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, help="just these contestants")
    parser.add_argument("--models", nargs="*", choices=ROWS, default=list(ROWS), help="just these models")
    arguments = parser.parse_args()
    need("wrk")
    found = []
    for name in arguments.only or CONTESTANTS:
        for model, batches in CONTESTANTS[name].batches.items():
            if model not in arguments.models:
                continue
            with tempfile.TemporaryDirectory() as directory:
                version = written(name, model, Path(directory))
                for batch in batches:
                    found.append(measure(name, version, batch, arguments.seconds, arguments.rounds))
                    print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    text = f"Measured on {machine()}; {arguments.rounds} rounds of {arguments.seconds} s.\n\n{table(found)}"
    publish("backends", text, arguments)


if __name__ == "__main__":
    main()
