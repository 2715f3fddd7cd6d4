"""Hosts in network namespaces with nodes of Ray, for ``make exam-ray``. Needs root and ``ip``."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RAY = Path(os.environ.get("NERITE_RAY_ENVIRONMENT", ROOT / ".venv" / "ray"))
"""Environment with Ray and Nerite."""
NET = "10.213.87"
BRIDGE = "nray"
PORT = 6379


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class Host:
    """A host with an address of its own."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"nray{number}"
        self.address = f"{NET}.{number}"
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        self.node_command: list[str] = []
        self.node: subprocess.Popen[bytes] | None = None
        ip("netns", "add", self.name)
        ip("link", "add", f"{self.name}o", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", f"{self.name}o", "master", BRIDGE, "up")
        for words in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            ip("-n", self.name, *words.split())
        ip("-n", self.name, "route", "add", "default", "via", f"{NET}.254")  # Ray asks which address leads outside

    @property
    def environment(self) -> dict[str, str]:
        # Hosts reach each other and nobody else, so no proxy.
        known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        known = {name: value for name, value in known.items() if not name.lower().endswith("_proxy")}
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.folder), "RAY_AUTH_MODE": "token"}
        own |= {"HOME": str(self.folder), "PYTHONUNBUFFERED": "1"}
        path = f"{RAY}/bin:{os.environ['PATH']}"
        return {**known, **own, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def run(self, command: str | Sequence[str], seconds: float = 180, cwd: Path = ROOT, fails: bool = False) -> str:
        """Run a command on the host; return what it printed."""
        words = ["bash", "-ec", command] if isinstance(command, str) else list(command)
        done = subprocess.run(
            self.command(*words), cwd=cwd, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=seconds, check=False, start_new_session=True,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, f"{command}\n{done.stdout[-6000:]}"
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command on the host, whose output goes to a file that a failure shows.

        In a session of its own, so that Linux gives each host a share of the processors: of a node that is not up
        within 30 s Ray makes nothing.
        """
        with (self.folder / f"{self.name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(*words), env=self.environment, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )  # fmt: skip
        self._running.append(process)
        return process

    def join(self, head: Host | None = None, *, cpus: int = 2, resources: str = "{}") -> None:
        """Start a node of Ray: the head, or one of the cluster of ``head``."""
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        self.node_command = [
            "ray", "start", "--block", *(where if head is None else [f"--address={head.address}:{PORT}"]),
            f"--node-ip-address={self.address}", f"--num-cpus={cpus}", f"--resources={resources}",
            "--object-store-memory=80000000",
        ]  # fmt: skip
        self.node = self.start(*self.node_command)

    def has(self, *others: Host) -> bool:
        """Return whether the nodes of others are alive, as this one says.

        On a busy machine Ray gives up and has to begin again.
        """
        alive = self.nodes()
        for host in others:
            if host.address not in alive and host.node is not None and host.node.poll() is not None:
                host.node = host.start(*host.node_command)
        return all(host.address in alive for host in others)

    def cut(self) -> None:
        """Take the host off the net, and kill everything on it: nobody is told."""
        ip("link", "set", f"{self.name}o", "down")
        self.kill()

    def kill(self) -> None:
        """Kill everything that runs on the host."""
        self.node = None
        while pids := ip("netns", "pids", self.name, check=False).split():
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for process in self._running:
                process.poll()
            time.sleep(0.05)

    def remove(self) -> None:
        self.kill()
        for process in self._running:
            process.wait(10)
        ip("netns", "del", self.name, check=False)
        ip("link", "del", f"{self.name}o", check=False)

    def nodes(self) -> dict[str, str]:
        """Return the ids of the nodes that are alive by their addresses, as Ray on this host says."""
        program = (
            "import json, ray; ray.init(address='auto', log_to_driver=False, logging_level='error');"
            "print('NODES', json.dumps({n['NodeManagerAddress']: n['NodeID'] for n in ray.nodes() if n['Alive']}))"
        )
        found = self.run(f'python -c "{program}" || true').partition("NODES ")[2].partition("\n")[0]
        return dict(json.loads(found)) if found else {}


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """A bridge with hosts."""
    with tempfile.TemporaryDirectory(prefix="nray", dir="/tmp") as folder:  # paths of sockets are short
        made: list[Host] = []
        token = Path(folder, ".ray", "auth_token")
        token.parent.mkdir()
        token.write_text(secrets.token_hex(32))
        ip("link", "add", BRIDGE, "type", "bridge")
        try:
            ip("addr", "add", f"{NET}.254/24", "dev", BRIDGE)
            ip("link", "set", BRIDGE, "up")
            for number in range(1, count + 1):
                made.append(Host(number, Path(folder)))
            yield made
        except BaseException:
            for host in made:
                log = host.folder / f"{host.name}.log"
                print(f"{host.name}:\n{log.read_text(errors='replace')[-3000:] if log.exists() else ''}")
            raise
        finally:
            for host in made:
                host.remove()
            ip("link", "del", BRIDGE, check=False)
