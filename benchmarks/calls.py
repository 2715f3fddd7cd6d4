"""What it costs a model to call another model, beside Triton: one call, ten one after the other, ten at once.

    python benchmarks/calls.py [--seconds S] [--rounds N] [--print]

The cost of a call is what a request takes whose model makes N calls, less what it takes where the model makes none,
divided by N. Requests go over one HTTP connection, one at a time; the servers and models are asked in turn.
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from contestants import Contestant, identity_repository, nerite, real_triton
from loads import LARGE
from page import bring_up_to_date, machine

_SMALL = 16
_CALLER = """
import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.count = int(args["model_name"].rpartition("_")[2])

    def ask(self, value):
        return pb_utils.InferenceRequest(
            model_name="identity",
            requested_output_names=["OUTPUT0"],
            inputs=[pb_utils.Tensor("INPUT0", value)],
        )

    def value(self, request):
        return pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()

    def answer(self, value, responses):
        for response in responses:
            value = pb_utils.get_output_tensor_by_name(response, "OUTPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value[:, :1])])

"""
_ONE_BY_ONE = """
    def execute(self, requests):
        answers = []
        for request in requests:
            value = self.value(request)
            answers.append(self.answer(value, [self.ask(value).exec() for _ in range(self.count)]))
        return answers
"""
_AT_ONCE = """
    async def execute(self, requests):
        answers = []
        for request in requests:
            value = self.value(request)
            calls = [self.ask(value).async_exec() for _ in range(self.count)]
            answers.append(self.answer(value, await asyncio.gather(*calls)))
        return answers
"""


class Cell(NamedTuple):
    """A way of calling."""

    name: str
    model: str
    base: str
    """The same without calls."""
    calls: int


CELLS = (
    Cell("one call", "sync_1", "sync_0", 1),
    Cell("10 calls, one after the other", "sync_10", "sync_0", 10),
    Cell("10 calls at once (`async_exec`)", "async_10", "async_0", 10),
)


def main() -> None:
    """Run, and write or print the section of docs/benchmarks.md."""
    bring_up_to_date("calls", __doc__, report, 1.0)


def report(seconds: float, rounds: int) -> str:
    """Return the table."""
    lines = [
        f"Measured on {machine()}; {rounds} rounds of {seconds:g} s; microseconds a call.",
        "",
        "| | Triton | Nerite | share of Triton's | wanted |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        models = caller_repository(folder)
        servers = (
            stack.enter_context(real_triton(models, folder)),
            stack.enter_context(nerite("Nerite", models, folder)),
        )
        for size, count in (("64 bytes", _SMALL), ("602 KB", LARGE)):
            for cell in CELLS:
                theirs, ours = costs(servers, cell, count, seconds, rounds)
                lines.append(f"| {cell.name}, {size} | {theirs:,.0f} | {ours:,.0f} | **{ours / theirs:.2f}** | 0.33 |")
    return "\n".join(lines) + "\n"


def costs(
    servers: tuple[Contestant, Contestant], cell: Cell, count: int, seconds: float, rounds: int
) -> tuple[float, float]:
    """Return what a call costs on each server, in microseconds: medians of rounds in which all are asked in turn."""
    found: list[list[float]] = [[], []]
    for _ in range(rounds):
        for server, costs in zip(servers, found, strict=True):
            base = latency(server, cell.base, count, seconds / 2)
            costs.append((latency(server, cell.model, count, seconds) - base) / cell.calls)
    theirs, ours = map(statistics.median, found)
    return theirs, ours


def latency(server: Contestant, model: str, count: int, seconds: float) -> float:
    """Return what a request takes, in microseconds: the median of so many as there is time for."""
    header = {
        "inputs": [
            {"name": "INPUT0", "shape": [1, count], "datatype": "FP32", "parameters": {"binary_data_size": 4 * count}}
        ],
        "parameters": {"binary_data_output": True},
    }
    encoded = json.dumps(header).encode()
    body = encoded + bytes(4 * count)
    headers = {"Inference-Header-Content-Length": str(len(encoded))}
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
    taken = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = connection.getresponse()
        said = answer.read()
        taken.append(time.perf_counter() - began)
        if answer.status != 200:
            raise RuntimeError(f"{server.name}: {said.decode(errors='replace')}")
    connection.close()
    return statistics.median(taken) * 1e6


def caller_repository(folder: Path) -> Path:
    """Write the identity model, and those that call it so and so often."""
    models = identity_repository(folder)
    config = (models / "identity" / "config.pbtxt").read_text()
    for name in {name for cell in CELLS for name in (cell.model, cell.base)}:
        version = models / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config.replace('"identity"', f'"{name}"'))
        (version / "model.py").write_text(_CALLER + (_ONE_BY_ONE if name.startswith("sync") else _AT_ONCE))
    return models


if __name__ == "__main__":
    main()
