"""Requests of mixed length on a model whose turns cost the same whatever the batch: iterative, and with plain batching.

With plain dynamic batching a batch runs until its longest request is done, and nobody joins it. An iterative model
comes back to the server after each turn, so that a slot is taken again in the turn after it became free. The ideal is
computed: what the same turns would take if everything but the model were free.

    python benchmarks/iterative.py [--print]
"""

from __future__ import annotations

import argparse
import heapq
import json
import socket
import sys
import tempfile
import time
from pathlib import Path

from contestants import Contestant, nerite
from page import machine, write

TURN_SECONDS = 0.02
SLOTS = 8
LENGTHS = ([80] + [6] * 7) * 4
"""In the order of arrival."""
LIMIT = 1.15
"""How much more than the ideal it may take."""
FASTER = 3.0
"""How many times as fast it has to be."""
CONFIG = """
backend: "python"
max_batch_size: %d
input { name: "LENGTH" data_type: TYPE_INT32 dims: 1 }
output { name: "TURNS" data_type: TYPE_INT32 dims: 1 }
%s
"""
PLAIN = f"dynamic_batching {{ preferred_batch_size: {SLOTS} max_queue_delay_microseconds: 20000 }}"
ITERATIVE = f"""
sequence_batching {{
  iterative_sequence: true
  oldest {{ max_candidate_sequences: {SLOTS} }}
  state {{ input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_INT32 dims: 1 }}
}}
"""
MODEL = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def answer(name, turns):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.asarray(turns, np.int32).reshape(1, 1))])


def turn():
    # Sleeping alone takes as long as the system likes.
    over = time.perf_counter() + TURN_SECONDS
    time.sleep(TURN_SECONDS - 0.002)
    while time.perf_counter() < over:
        pass


def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0]


class TritonPythonModel:
    def execute(self, requests):
        turn()
        ...
"""
TURN = """
        answers = []
        for request in requests:
            turns = value(request, "BEFORE") + 1
            if turns < value(request, "LENGTH"):
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                answers.append(answer("AFTER", turns))
            else:
                answers.append(answer("TURNS", turns))
        return answers
"""
ALL_TURNS = """
        lengths = [value(request, "LENGTH") for request in requests]
        for _ in range(1, max(lengths)):
            turn()
        return [answer("TURNS", length) for length in lengths]
"""


def ideal() -> float:
    """Return the seconds that all requests take if each gets a slot as soon as one is free, and nothing else costs."""
    free = [0] * SLOTS
    for length in LENGTHS:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free) * TURN_SECONDS


def measured(server: Contestant, model: str) -> float:
    """Send every request, each on a connection of its own; return the seconds until all are answered."""
    connections = [socket.create_connection(("127.0.0.1", server.http)) for _ in LENGTHS]
    began = time.monotonic()
    for connection, length in zip(connections, LENGTHS, strict=True):
        tensor = {"name": "LENGTH", "shape": [1, 1], "datatype": "INT32", "data": [length]}
        body = json.dumps({"inputs": [tensor]})
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
    for connection, length in zip(connections, LENGTHS, strict=True):
        answer = b""
        while b'"data":[' not in answer:
            answer += connection.recv(65536)
        if not answer.startswith(b"HTTP/1.1 200") or f'"data":[{length}]'.encode() not in answer:
            raise RuntimeError(f"a wrong answer: {answer.decode()}")
    took = time.monotonic() - began
    for connection in connections:
        connection.close()
    return took


def repository(folder: Path) -> Path:
    """Write the model twice."""
    for name, batching, body in (("plain", PLAIN, ALL_TURNS), ("iterative", ITERATIVE, TURN)):
        model = folder / "models" / name
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(CONFIG % (SLOTS, batching))
        source = MODEL.replace("        ...\n", body.lstrip("\n")).replace("TURN_SECONDS", str(TURN_SECONDS))
        (model / "1" / "model.py").write_text(source)
    return folder / "models"


def main() -> None:
    """Measure, and write the table; end with status 1 if it is not good enough."""
    parser = argparse.ArgumentParser(description="iterative sequences beside plain batching")
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it into the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, nerite("Nerite", repository(Path(folder)), Path(folder)) as server:
        measured(server, "iterative")
        plain = measured(server, "plain")
        iterative = min(measured(server, "iterative") for _ in range(3))
    best = ideal()
    lines = [
        f"{len(LENGTHS)} requests of {min(LENGTHS)} to {max(LENGTHS)} turns, {SLOTS} at a time, "
        f"{TURN_SECONDS * 1000:.0f} ms a turn. {machine()}.",
        "",
        "| | seconds | of the ideal |",
        "|---|---|---|",
        f"| ideal, computed | {best:.2f} | 1.00 |",
        f"| iterative sequences | {iterative:.2f} | {iterative / best:.2f} |",
        f"| plain dynamic batching | {plain:.2f} | {plain / best:.2f} |",
    ]
    text = "\n".join(lines) + "\n"
    if options.print:
        print(text, end="")
    else:
        write("iterative", text)
    if iterative > LIMIT * best or plain < FASTER * iterative:
        sys.exit(
            f"iterative sequences took {iterative:.2f} s, {LIMIT} of {best:.2f} s and {plain:.2f} s / {FASTER} are due"
        )


if __name__ == "__main__":
    main()
