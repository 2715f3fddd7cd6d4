"""Starts a server on a copy of a repository, on ports of its own, and stops it: Triton or Nerite, the same way."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from conformance import triton
from conformance.exchange import Scene

REPOSITORIES = Path(__file__).with_name("repositories")
START_SECONDS = 60.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Server:
    """A running server. ``models`` is its own copy of the scene's repository, ``second`` the other one, if any."""

    name: str
    models: Path
    second: Path
    http: int
    grpc: int
    metrics: int
    log: Path
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End the process: politely, then by force."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait(self) -> None:
        """Return when all three ports accept connections. Raises ``RuntimeError`` with the end of the log."""
        deadline = time.monotonic() + START_SECONDS
        # Triton opens the metrics port last.
        for port in (self.http, self.grpc, self.metrics):
            while not listening(port):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text()[-4000:]}")
                time.sleep(0.05)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start_triton(scene: Scene, folder: Path) -> Server:
    """Start Triton; ``wait`` for it before use. Raises ``TritonUnavailable``."""
    head, environment = triton.command(triton.installation(), folder / "backends")
    return start("triton", scene, folder, head, environment)


def start_nerite(scene: Scene, folder: Path) -> Server:
    """Start Nerite; ``wait`` for it before use."""
    nerite = Path(sys.executable).with_name("nerite")
    return start("nerite", scene, folder, [str(nerite), "serve", *scene.own_flags], dict(os.environ))


def start(name: str, scene: Scene, folder: Path, head: list[str], environment: dict[str, str]) -> Server:
    models, second = folder / "models", folder / "second"
    source = REPOSITORIES / scene.repository
    for place, names in (
        (models, scene.models or sorted(path.name for path in source.iterdir())),
        (second, scene.second),
    ):
        place.mkdir(parents=True)
        for model in names:
            shutil.copytree(source / model, place / model, ignore=shutil.ignore_patterns("__pycache__"))
    http, grpc, metrics = free_ports()
    log = folder / "log"
    options = [f"--model-repository={models}", f"--http-port={http}", f"--grpc-port={grpc}"]
    if scene.second:
        options.append(f"--model-repository={second}")
    options += [f"--metrics-port={metrics}", "--exit-timeout-secs=2", *scene.flags]
    with log.open("wb") as sink:
        process = subprocess.Popen([*head, *options], env=environment, stdout=sink, stderr=subprocess.STDOUT)
    return Server(name, models, second, http, grpc, metrics, log, process)


def free_ports() -> tuple[int, int, int]:
    """Three ports that nobody listens on. All are held until the last is found, so that they differ."""
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        for held in (first, second, third):
            held.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1], third.getsockname()[1]
