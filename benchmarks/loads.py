"""The loads: public generators, and NVIDIA's client. Each returns the pace of one short run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from contestants import ROOT, Contestant

sys.path.insert(0, str(ROOT / "src"))

SMALL = 16
LARGE = 150_528
"""FP32 elements: 64 bytes, and 602 KB (a picture of 224 x 224)."""


class Pace(NamedTuple):
    """What one run showed."""

    rate: float
    """Requests a second."""
    client: float
    """Seconds of processor time that the client itself used for one."""


Load = Callable[[Contestant], Pace]


def need(*tools: str) -> None:
    """Exit with what to install if a generator is missing."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        packages = {"h2load": "nghttp2-client", "nginx": "nginx-light"}
        sys.exit(f"install {', '.join(packages.get(tool, tool) for tool in missing)} first (apt-get install)")


def write_bodies(folder: Path, model: str = "identity") -> None:
    """Write the requests that wrk and h2load post to an identity model."""
    from nerite.wire.grpc_service import ModelInferRequest

    for name, count in (("small", SMALL), ("large", LARGE)):
        data = b"\0\0\x80?" * count
        write_http(folder, name, ("INPUT0", [1, count], data), "OUTPUT0")
        message = ModelInferRequest(
            model_name=model,
            inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, count]}],
            raw_input_contents=[data],
        ).SerializeToString()
        (folder / f"{name}.grpc").write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)


def write_http(folder: Path, name: str, tensor: tuple[str, list[int], bytes], output: str) -> None:
    """Write the request with one binary FP32 ``tensor`` (name, shape, bytes) that wrk posts as ``name``."""
    input_name, shape, data = tensor
    parameters = {"binary_data_size": len(data)}
    head = json.dumps(
        {
            "inputs": [{"name": input_name, "shape": shape, "datatype": "FP32", "parameters": parameters}],
            "outputs": [{"name": output, "parameters": {"binary_data": True}}],
        }
    ).encode()
    (folder / f"{name}.http").write_bytes(head + data)
    (folder / f"{name}.lua").write_text(
        f'local file = io.open("{folder}/{name}.http", "rb")\n'
        'wrk.body = file:read("*a")\nfile:close()\nwrk.method = "POST"\n'
        f'wrk.headers["Inference-Header-Content-Length"] = "{len(head)}"\n'
        'wrk.headers["Content-Type"] = "application/octet-stream"\n'
    )


def wrk(
    folder: Path,
    body: str,
    connections: int,
    seconds: float,
    model: str = "identity",
    *,
    tls: bool = False,
    threads: int = 1,
) -> Load:
    """Post the request written as ``body`` over HTTP/1.1 from ``connections`` connections."""

    def run(server: Contestant) -> Pace:
        url = f"{'https' if tls else 'http'}://127.0.0.1:{server.http}/v2/models/{model}/infer"
        command = ["wrk", f"-t{threads}", f"-c{connections}", f"-d{seconds:g}s", "-s", f"{folder}/{body}.lua", url]
        said, spent = _output(command)
        if "Non-2xx" in said:
            raise RuntimeError(f"{server.name} answered with errors: {said}")
        return Pace(float(_found(r"Requests/sec:\s+([\d.]+)", said)), spent / int(_found(r"(\d+) requests in", said)))

    return run


def h2load(
    folder: Path, size: str, connections: int, streams: int, seconds: float, *, tls: bool = False, threads: int = 1
) -> Load:
    """Post a serialized ModelInferRequest over HTTP/2, on ``streams`` streams of ``connections`` connections."""

    def run(server: Contestant) -> Pace:
        url = f"{'https' if tls else 'http'}://127.0.0.1:{server.grpc}/inference.GRPCInferenceService/ModelInfer"
        command = ["h2load", f"-D{seconds:g}", f"-c{connections}", f"-m{streams}", f"-t{threads}"]
        command += ["-d", f"{folder}/{size}.grpc", "-H", "content-type: application/grpc", "-H", "te: trailers", url]
        said, spent = _output(command)
        done = int(_found(r"status codes: (\d+) 2xx", said))
        if int(_found(r"(\d+) failed", said)) or done == 0:
            raise RuntimeError(f"{server.name} answered with errors: {said}")
        return Pace(float(_found(r"finished in [\d.]+s, ([\d.]+) req/s", said)), spent / done)

    return run


_CLIENT = """
import sys, time
import numpy as np
import tritonclient.{protocol} as client_of

client = client_of.InferenceServerClient(sys.argv[1])
tensor = client_of.InferInput("INPUT0", [1, {count}], "FP32")
tensor.set_data_from_numpy(np.ones((1, {count}), np.float32))
outputs = [client_of.InferRequestedOutput("OUTPUT0")]
for _ in range({warm}):
    client.infer("identity", [tensor], outputs=outputs)
calls, began, spent = 0, time.perf_counter(), time.process_time()
while time.perf_counter() - began < {seconds}:
    client.infer("identity", [tensor], outputs=outputs).as_numpy("OUTPUT0")
    calls += 1
print(calls / (time.perf_counter() - began), (time.process_time() - spent) / calls)
"""


def tritonclient(protocol: str, size: str, seconds: float) -> Load:
    """Call with NVIDIA's client, one call at a time, in a process of its own."""
    program = _CLIENT.format(protocol=protocol, count=SMALL if size == "small" else LARGE, warm=50, seconds=seconds)

    def run(server: Contestant) -> Pace:
        url = f"127.0.0.1:{server.http if protocol == 'http' else server.grpc}"
        command = [sys.executable, "-c", program, url]
        rate, client = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return Pace(float(rate), float(client))

    return run


def _output(command: list[str]) -> tuple[str, float]:
    """Return what a command says, and the processor time it used."""
    before = os.times()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return said, spent


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern!r} in: {text}")
    return match[1]
