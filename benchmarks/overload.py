"""More than a model can do: how much of its work is of use to somebody, and how long those wait who are served.

The model takes 4 ms for a batch of up to 4 requests, without a processor, as on a GPU. Its peak is measured with wrk
and 64 connections; then twice as much is sent, and ten times, at a steady pace (``open_loop.py``). An answer is of use
if it comes within a second.

    python benchmarks/overload.py [--seconds S] [--print]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from contestants import Contestant, nerite, real_triton
from footprint import resident
from loads import SMALL, need, write_http, wrk
from page import machine, write

_PEAK_CONNECTIONS = 64
_CONFIG = """
name: "steady"
backend: "python"
max_batch_size: 4
input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU }]
dynamic_batching {}
"""
_MODEL = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.004)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""


def offered(server: Contestant, folder: Path, protocol: str, peak: float, times: int, seconds: int) -> str:
    """Send ``times`` what the model can do; return a line of the table."""
    before = resident(server.process.pid)
    port = server.http if protocol == "http" else server.grpc
    size = json.loads((folder / "sizes").read_text())
    rate = str(times * peak)
    command = [sys.executable, str(Path(__file__).with_name("open_loop.py")), protocol, str(port)]
    command += [str(folder / f"small.{protocol}"), str(size), rate, str(seconds)]
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    more = resident(server.process.pid) - before
    figures = [peak, done["sent"] / seconds, done["answered"] / seconds, done["useful"] / seconds]
    title = f"{server.name}, {'HTTP' if protocol == 'http' else 'gRPC'}, {times} x"
    return (
        f"| {title} | {' | '.join(f'{figure:,.0f}' for figure in figures)} | **{figures[-1] / peak:.0%}** "
        f"| {done['took']} | {done['took_late']} | {done['refused'] / seconds:,.0f} | {more:,.0f} MB |"
    )


def write_requests(folder: Path) -> None:
    """Write what is sent."""
    from nerite.wire.grpc_service import ModelInferRequest

    data = b"\0\0\x80?" * SMALL
    write_http(folder, "small", ("INPUT0", [1, SMALL], data), "OUTPUT0")
    (folder / "sizes").write_text(json.dumps(len((folder / "small.http").read_bytes()) - len(data)))
    message = ModelInferRequest(
        model_name="steady",
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, SMALL]}],
        raw_input_contents=[data],
    ).SerializeToString()
    (folder / "small.grpc").write_bytes(b"\0" + len(message).to_bytes(4) + message)


def write_model(folder: Path) -> Path:
    """Write the repository that both serve."""
    model = folder / "models" / "steady"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG)
    (model / "1" / "model.py").write_text(_MODEL)
    return model.parent


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="of each run (default: %(default)s)")
    parser.add_argument("--print", action="store_true", help="print the table and leave the page alone")
    options = parser.parse_args()
    need("wrk")
    lines = [
        "| | peak/s | offered/s | answered/s | within 1 s | of the peak | p50, p99 | in the second half "
        "| refused/s | memory |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_requests(folder)
        repository = write_model(folder)
        for start in (lambda: nerite("Nerite", repository, folder), lambda: real_triton(repository, folder)):
            for protocol in ("http", "grpc"):
                for times in (2, 10):
                    # Each run has a server of its own: what one leaves behind is not the other's.
                    with start() as server:
                        load = wrk(folder, "small", _PEAK_CONNECTIONS, 2, "steady")
                        load(server)
                        peak = load(server).rate
                        lines.append(offered(server, folder, protocol, peak, times, options.seconds))
    text = f"Measured on {machine()}; {options.seconds} s each.\n\n"
    text += "\n".join(lines) + "\n"
    if options.print:
        print(text)
    else:
        write("overload", text)


if __name__ == "__main__":
    main()
