"""A real server for tests: ``nerite serve`` as a subprocess, on ports of its own choosing."""

from __future__ import annotations

import http.client
import io
import json
import re
import signal
import socket
import struct
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forked_programs import NERITE, Process, start_program

PATIENCE = 90.0
"""Seconds after which something hangs, however busy the machine. Less than pytest gives a test, so that it can tell."""
_FRONT = "front_"
_NOTED = re.compile("was read: |was read and is in force|The previous policy stays in force|until it is corrected")
_MODEL_NAME = re.compile(r'(?<=",)model_name="[^"]*",')
_STARTED = re.compile(r"Started (.+?)(?: Service)? at [^\s:]+:(\d+)")


ALL_TENANTS = "--http-restricted-api=statistics:x-admin-key=tests"
"""Flag of a server with a policy whose tests read the figures of all tenants, with ``Serving.json``."""


class Serving:
    """A server that runs. Stopped by ``stop``, which tells the exit status."""

    started = "Listening: "
    """What it says when its ports are open."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.ports: dict[str, int] = {}

    def wait(self) -> None:
        """Return when the ports are open. Raises ``RuntimeError``, with the log, if that does not happen."""
        deadline = time.monotonic() + PATIENCE
        while self.started not in self.text:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.text[-4000:]}")
            time.sleep(0.01)
        self.ports = {name: int(port) for name, port in _STARTED.findall(self.text)}

    @property
    def text(self) -> str:
        """All that the server has said."""
        return self.log.read_text(errors="replace")

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.ports['HTTPService']}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports['GRPCInferenceService']}"

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] = b"",
        *,
        service: str = "HTTPService",
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one HTTP request to the port of a service; return status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[service], timeout=PATIENCE)
        try:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: bytes | Mapping[str, Any] = b"") -> Any:
        """Send one HTTP request with the key to the figures of all tenants; return the JSON of the answer."""
        return json.loads(self.ask(method, path, body, x_admin_key="tests")[2])

    def infer(self, model: str, values: list[Any], name: str = "INPUT0", datatype: str = "FP32") -> list[Any]:
        """Send one row to a model of one input; return the data of the first output. Raises on an error answer."""
        tensor = {"name": name, "shape": [1, len(values)], "datatype": datatype, "data": values}
        status, _, body = self.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
        if status != 200:
            raise RuntimeError(f"{status}: {body.decode()}")
        data: list[Any] = json.loads(body)["outputs"][0]["data"]
        return data

    def ready(self, model: str = "") -> bool:
        """Say whether the server, or a model, is ready."""
        return self.ask("GET", f"/v2/models/{model}/ready" if model else "/v2/health/ready")[0] == 200

    def state(self, model: str, version: str = "1") -> str:
        """Return the state of a version, as the repository index has it."""
        entries = self.json("POST", "/v2/repository/index")
        found = [
            entry.get("state", "") for entry in entries if entry["name"] == model and entry.get("version") == version
        ]
        return found[0] if found else ""

    def metrics(self) -> dict[str, float]:
        """Return the samples of the metrics page, without the label ``model_name``, which repeats ``model``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["Metrics"], timeout=PATIENCE)
        connection.request("GET", "/metrics")
        lines = _MODEL_NAME.sub("", connection.getresponse().read().decode()).splitlines()
        connection.close()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def follow(self, file: Path, text: str) -> None:
        """Change a file that the server looks at, in one step; return when it has taken note of it, or of mistakes."""
        noted = len(_NOTED.findall(self.text))
        new = file.with_name(f"{file.name}.new")
        new.write_text(text)
        new.rename(file)
        eventually(lambda: len(_NOTED.findall(self.text)) > noted)

    def workers(self) -> dict[str, int]:
        """Return the worker processes by instance name, without helper processes and front processes."""
        return {name: pid for name, pid in self._forked().items() if not name.startswith(_FRONT)}

    def fronts(self) -> dict[str, int]:
        """Return the front processes by name."""
        return {name: pid for name, pid in self._forked().items() if name.startswith(_FRONT)}

    def _forked(self) -> dict[str, int]:
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    name = (folder / "comm").read_text().strip()
                    ancestor = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, ValueError):
                    continue
                if ancestor == self.process.pid and name != "helper":
                    found[name] = int(folder.name)
        return found

    def stop(self) -> int:
        """End the server politely; return its exit status. Killed, and an error, if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


class OneReader:
    """A socket for several ``HTTPResponse`` one after the other: what one has read ahead the next one gets."""

    class File(io.BufferedReader):
        def close(self) -> None:
            """Leave it open: the connection's owner closes the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.file = self.File(socket.SocketIO(connection, "r"))

    def makefile(self, mode: str) -> io.BufferedReader:
        return self.file


@contextmanager
def serving(
    repository: Path | str,
    log: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    clean: bool = True,
    internal_errors: bool = False,
    within: Sequence[str] = (),
    kind: type[Serving] = Serving,
) -> Iterator[Serving]:
    """Run a server on free ports of 127.0.0.1.

    ``within``: a command that becomes the one that stands behind it, with other limits or other mounts.
    ``kind``: one that finds elsewhere what the server says.

    ``clean``: it must have ended with status 0. Unless ``internal_errors`` are expected, there must have been none: no
    exception that the server did not foresee, and no finding of its audit.
    """
    options = [
        f"--{service}-{what}" for service in ("http", "grpc", "metrics") for what in ("address=127.0.0.1", "port=0")
    ]
    command = [*within, NERITE, "serve", repository, *options, *flags]
    with program(command, log, environment=environment, clean=clean, internal_errors=internal_errors, kind=kind) as it:
        yield it


@contextmanager
def program(
    command: Sequence[str | Path],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    clean: bool = True,
    internal_errors: bool = False,
    kind: type[Serving] = Serving,
) -> Iterator[Serving]:
    """Run a program that says on which ports it serves, such as a router; see ``serving``."""
    with log.open("wb") as sink:
        running = kind(start_program(command, sink, environment=environment), log)
    try:
        running.wait()
        yield running
    finally:
        status = running.stop()
    if clean:
        assert status == 0, running.text[-4000:]
    if not internal_errors:
        at = running.text.find("internal error, incident")
        assert at < 0, running.text[max(at - 200, 0) : at + 4000]


def accepts(address: str) -> bool:
    """Return whether a port accepts connections."""
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def eventually(holds: Callable[[], bool], seconds: float = 45.0, what: str = "") -> None:
    """Wait until ``holds()``; fail if it never does. Asks less often the longer it waits: asking takes time as well."""
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        assert waited < seconds, what or "it never happened"
        time.sleep(min(0.01 + waited / 50, 0.05))


@contextmanager
def served(command: list[str], log: Path, started: str = Serving.started) -> Iterator[Serving]:
    """Run a program that serves, in the directory of its log; ``started``: what it says when its ports are open."""
    with log.open("wb") as file:
        process = start_program(command, file, folder=log.parent)
    running = Serving(process, log)
    running.started = started
    try:
        running.wait()
        yield running
    finally:
        process.terminate()
        process.wait(PATIENCE)


def python_model(repository: Path, name: str, source: str, config: str = "", version: int = 1) -> Path:
    """Write a Python model; return its directory. ``source`` is the body of the class, ``config`` the whole file."""
    directory = repository / name
    (directory / str(version)).mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(config or pbtxt())
    body = textwrap.indent(textwrap.dedent(source), "    ")
    (directory / str(version) / "model.py").write_text(
        "import os, sys, time, signal, logging\n"
        "import numpy as np\n"
        "import triton_python_backend_utils as pb_utils\n\n\n"
        f"class TritonPythonModel:\n{body}"
    )
    return directory


def pbtxt(
    batch: int = 8,
    more: str = "dynamic_batching {}",
    datatype: str = "TYPE_FP32",
    dims: str = "-1",
    parameters: str = "",
) -> str:
    """Return the configuration of a Python model with INPUT0 and OUTPUT0."""
    return (
        f'backend: "python"\nmax_batch_size: {batch}\n'
        f'input [{{ name: "INPUT0" data_type: {datatype} dims: [ {dims} ] }}]\n'
        f'output [{{ name: "OUTPUT0" data_type: {datatype} dims: [ {dims} ] }}]\n'
        f"instance_group [{{ kind: KIND_CPU }}]\n{more}\n{parameters}\n"
    )


IN_PROCESS = 'parameters { key: "EXECUTION_MODE" value: { string_value: "in_process" } }'

IDENTITY = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""

HELD = """
def execute(self, requests):
    answers = []
    for request in requests:
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        print("executes", values.flat[0], flush=True)
        while values.flat[0] < 0 and not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            time.sleep(0.001)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
    return answers
"""
"""The body of a Python model that is busy with a negative number until ``let_go``."""


def let_go(model: Path, version: int = 1) -> None:
    """Let the model in this directory, whose body is ``HELD``, finish what it has begun."""
    (model / str(version) / "go").touch()


def adds(amount: int) -> str:
    """Return the body of a Python model that adds a number."""
    return f"""
def execute(self, requests):
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() + {amount})]
        )
        for request in requests
    ]
"""


def binary_request(
    array: np.ndarray[Any, Any], name: str = "INPUT0", datatype: str = "FP32"
) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of an infer request with one binary tensor, asking for a binary answer."""
    raw = array.tobytes()
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "shape": list(array.shape),
                    "datatype": datatype,
                    "parameters": {"binary_data_size": len(raw)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return head + raw, {"Inference-Header-Content-Length": str(len(head))}


def strings(*elements: bytes) -> bytes:
    """Return the wire form of a BYTES tensor."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def step(model: str, taken: str, given: str) -> str:
    """Return a step of an ensemble, from a tensor of it to another."""
    return (
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "INPUT0" value: "{taken}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{given}" }} }}'
    )


def ensemble(repository: Path, name: str, *steps: str, outputs: tuple[str, ...] = ("OUTPUT0",), more: str = "") -> None:
    """Write an ensemble from INPUT0 to these outputs."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    declared = ", ".join(f'{{ name: "{each}" data_type: TYPE_FP32 dims: [ -1 ] }}' for each in outputs)
    (folder / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 1\n'
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }\n'
        f"output [ {declared} ]\nensemble_scheduling {{ {more} step [ {', '.join(steps)} ] }}\n"
    )
