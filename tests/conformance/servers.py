"""Starts a server on a copy of a repository, on ports of its own, and stops it: Triton or Nerite, the same way."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from conformance import triton_installation
from conformance.exchange import Http, Scene
from conformance.repositories import repository, write
from forked_programs import NERITE, Process, start_program
from ports import free_ports

BACKENDS = Path(__file__).with_name("backends")
START_SECONDS = 240.0
"""Triton's start takes a few seconds, and much longer while other programs keep the machine busy."""
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
    cloud: int
    """Open only where the scene says so."""
    backends: Path
    """Its backend directory."""
    log: Path
    process: Process

    def port_of(self, request: Http) -> int:
        """Return the port that a request is for."""
        return {"http": self.http, "metrics": self.metrics, "cloud": self.cloud}[request.port]

    def stop(self) -> None:
        """End the process: politely, then by force; and what is left of those it started."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

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
    head, environment = triton_installation.command(triton_installation.installation(), folder / "backends")
    return start("triton", scene, folder, head, environment)


def start_nerite(scene: Scene, folder: Path) -> Server:
    """Start Nerite; ``wait`` for it before use."""
    head = [str(NERITE), "serve", f"--backend-directory={folder / 'backends'}", *scene.own_flags]
    return start("nerite", scene, folder, head, {})


def start(name: str, scene: Scene, folder: Path, head: list[str], environment: dict[str, str]) -> Server:
    models, second = folder / "models", folder / "second"
    source = repository(scene.repository)
    for place, names in ((models, scene.models or source), (second, scene.second)):
        place.mkdir(parents=True)
        for model in names:
            write(source[model], place / model)
    backends = folder / "backends"
    for name_of_backend in scene.backends:
        shutil.copytree(BACKENDS / name_of_backend, backends / name_of_backend)
    http, grpc, metrics, cloud = free_ports(4)
    log = folder / "log"
    options = [f"--model-repository={models}", f"--http-port={http}", f"--grpc-port={grpc}"]
    if scene.second:
        options.append(f"--model-repository={second}")
    options += [f"--metrics-port={metrics}", "--exit-timeout-secs=2"]
    options += [flag.replace("{models}", str(models)) for flag in scene.flags]
    if scene.cloud:
        options += [f"--allow-{scene.cloud}=true", f"--{scene.cloud}-port={cloud}"]
    environment = {**environment, **dict(scene.environment)}
    with log.open("wb") as sink:
        process = start_program([*head, *options], sink, environment=environment, session=True)
    return Server(name, models, second, http, grpc, metrics, cloud, backends, log, process)
