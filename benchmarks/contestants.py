"""The servers that are compared, each with the same identity model, started as a user would start them."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "conformance"))

import triton_installation  # noqa: E402  the installer of the reference, which the conformance tests use too

ASLEEP = "--stay-awake-microseconds=0"
"""Flag that turns busy polling off."""
_START_SECONDS = 240.0
_CONFIG = """
name: "identity"
backend: "python"
max_batch_size: 64
input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU }]
dynamic_batching {}
"""
_IN_PROCESS = 'parameters { key: "EXECUTION_MODE" value: { string_value: "in_process" } }\n'
_MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""


@dataclass(frozen=True)
class Contestant:
    """A server that runs."""

    name: str
    http: int
    grpc: int
    process: subprocess.Popen[bytes]
    metrics: int = 0


def identity_repository(folder: Path, *, in_process: bool = False) -> Path:
    """Write the repository that all contestants serve."""
    model = folder / "models" / "identity"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(_CONFIG + (_IN_PROCESS if in_process else ""))
    (model / "1" / "model.py").write_text(_MODEL)
    return model.parent


@contextmanager
def nerite(
    name: str, repository: Path, folder: Path, *flags: str, checkout: Path | None = None, under: Sequence[str] = ()
) -> Iterator[Contestant]:
    """Run Nerite, of another ``checkout`` if one is given, and ``under`` another program."""
    command = [*under, sys.executable, str(Path(sys.executable).with_name("nerite")), "serve"]
    # Installed software has its bytecode; without this every start would compile our sources.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if checkout is not None:
        environment["PYTHONPATH"] = str(checkout / "src")
    with _running(name, command, environment, repository, folder, flags) as contestant:
        yield contestant


@contextmanager
def real_triton(repository: Path, folder: Path, *flags: str, name: str = "Triton") -> Iterator[Contestant]:
    """Run NVIDIA's Triton; installed on first use."""
    backends = folder / f"{name.replace(' ', '-')}-backends"
    head, environment = triton_installation.command(triton_installation.installation(), backends)
    with _running(name, head, environment, repository, folder, flags) as contestant:
        yield contestant
    shutil.rmtree(backends)


@contextmanager
def _running(
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    repository: Path,
    folder: Path,
    flags: Sequence[str],
) -> Iterator[Contestant]:
    http, grpc, metrics = free_ports()
    options = [f"--model-repository={repository}", f"--http-port={http}", f"--grpc-port={grpc}"]
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, *options, f"--metrics-port={metrics}", *flags],
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    with stopped(process):
        wait_ready(http, process, log, tls="--http-use-ssl=true" in flags)
        yield Contestant(name, http, grpc, process, metrics)


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the process when the block ends."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(
    http: int,
    process: subprocess.Popen[bytes],
    log: Path,
    what: str = "v2/health/ready",
    seconds: float = _START_SECONDS,
    *,
    tls: bool = False,
) -> None:
    """Return when a server says that it, or a model, is ready. Raises ``RuntimeError`` if it ends or takes too long."""
    deadline = time.monotonic() + seconds
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    url = f"{'https' if tls else 'http'}://127.0.0.1:{http}/{what}"
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1, context=trusting if tls else None) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a contestant did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.005)


def free_ports() -> list[int]:
    """Return three ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(3)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()
