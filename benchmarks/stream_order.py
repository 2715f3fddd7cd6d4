"""Streams through an ensemble whose later step has two instances: whether they keep their order, and what that costs.

    git worktree add --detach ../before REVISION
    python benchmarks/stream_order.py [../before] [--streams N] [--seconds S] [--rounds N] [--print]

"src" sends 12 numbers at once, "pass" returns each. In the first table it takes 4 ms for every third one and 1 ms for
the others, and streams come one after the other. In the second it takes no time, and eight clients stream; the servers
take turns, and a ratio is the median of those of two runs that follow each other.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

from contestants import ROOT, Contestant, nerite, real_triton
from page import command_line, machine, publish

_CLIENTS = 8
_NUMBERS = [*range(12)]
_BODY = json.dumps({"GO": 1})
_SRC = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(12):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("N", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_PASS = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "N").as_numpy()
            if {sleeps}:
                time.sleep(0.004 if number[0] % 3 == 0 else 0.001)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("M", number)]))
        return responses
"""


def repository(folder: Path, *, sleeps: bool) -> Path:
    """Write the two models, and the ensemble of them."""

    def tensor(field: str, name: str) -> str:
        return f'{field} [{{ name: "{name}" data_type: TYPE_INT32 dims: [ 1 ] }}]\n'

    python = 'backend: "python"\ninstance_group [{ kind: KIND_CPU count: %d }]\n'
    decoupled = "model_transaction_policy { decoupled: true }\n"
    steps = (
        '{ model_name: "src" model_version: -1 input_map { key: "GO" value: "GO" } '
        'output_map { key: "N" value: "n" } },'
        '{ model_name: "pass" model_version: -1 input_map { key: "N" value: "n" } output_map { key: "M" value: "M" } }'
    )
    for name, config, source in (
        ("src", python % 1 + decoupled + tensor("input", "GO") + tensor("output", "N"), _SRC),
        ("pass", python % 2 + tensor("input", "N") + tensor("output", "M"), _PASS.format(sleeps=sleeps)),
        (
            "both",
            f'platform: "ensemble"\nensemble_scheduling {{ step [ {steps} ] }}\n'
            + tensor("input", "GO")
            + tensor("output", "M"),
            "",
        ),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if source:
            (folder / name / "1" / "model.py").write_text(source)
    return folder


def stream(connection: HTTPConnection) -> list[int]:
    """Return the numbers of a stream."""
    connection.request("POST", "/v2/models/both/generate_stream", _BODY)
    text = connection.getresponse().read().decode()
    return [json.loads(line.removeprefix("data: "))["M"] for line in text.splitlines() if line.startswith("data: ")]


def out_of_order(server: Contestant, count: int) -> int:
    """Return how many of ``count`` streams have their numbers in another order. Raises ``ValueError`` for lost ones."""
    connection, wrong = HTTPConnection("127.0.0.1", server.http), 0
    for _ in range(count):
        numbers = stream(connection)
        if sorted(numbers) != _NUMBERS:
            raise ValueError(f"{server.name} answers {numbers}")
        wrong += numbers != _NUMBERS
    connection.close()
    return wrong


def rate(server: Contestant, seconds: float) -> float:
    """Return the responses a second that several clients get together."""
    counts = [0] * _CLIENTS
    until = time.monotonic() + seconds

    def client(number: int) -> None:
        connection = HTTPConnection("127.0.0.1", server.http)
        while time.monotonic() < until:
            counts[number] += len(stream(connection))
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__, 2.0, 9)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of an earlier version")
    parser.add_argument("--streams", type=int, default=1000, help="for the first table (default: %(default)s)")
    options = parser.parse_args()
    text = f"Measured on {machine()}.\n\n| | streams | out of order |\n|---|---|---|\n"
    checkouts = {"now": ROOT} | ({} if options.before is None else {"before": options.before.resolve()})
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        uneven, even = (repository(folder / kind, sleeps=kind == "uneven") for kind in ("uneven", "even"))
        with ExitStack() as first:
            servers = [first.enter_context(real_triton(uneven, folder))]
            servers += [
                first.enter_context(nerite(f"Nerite, {which}", uneven, folder, checkout=checkout))
                for which, checkout in checkouts.items()
            ]
            for server in servers:
                line = f"| {server.name} | {options.streams:,} | {out_of_order(server, options.streams):,} |"
                print(line, file=sys.stderr, flush=True)
                text += line + "\n"
        servers = [stack.enter_context(real_triton(even, folder, name="Triton even"))]
        servers += [
            stack.enter_context(nerite(f"{which} even", even, folder, checkout=checkout))
            for which, checkout in checkouts.items()
        ]
        runs = []
        for number in range(options.rounds):
            order = servers if number % 2 else servers[::-1]
            done = {server.name: rate(server, options.seconds) for server in order}
            runs.append([done[server.name] for server in servers])
            print(" ".join(f"{each:,.0f}" for each in runs[-1]), file=sys.stderr, flush=True)
        text += f"\n{options.rounds} rounds of {options.seconds:g} s; responses a second.\n\n"
        text += "| | responses | now, as a ratio of it |\n|---|---|---|\n"
        for at, named in enumerate(("Triton", "Nerite, now", "Nerite, before")[: len(servers)]):
            ratio = statistics.median(run[1] / run[at] for run in runs)
            text += f"| {named} | {statistics.median(run[at] for run in runs):,.0f} | **{ratio:.2f}** |\n"
    publish("stream order", text, options)


if __name__ == "__main__":
    main()
