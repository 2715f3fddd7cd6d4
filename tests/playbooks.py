"""docs/playbooks.md as tests play it: its files, its commands, and a platform on which they are typed."""

from __future__ import annotations

import http.client
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pages import ROOT, Page, run
from prometheus_server import Prometheus, prometheus_server, short_rules
from routing import ROUTER, routing
from serving import PATIENCE, Serving, eventually

_NAME: Final = "docs/playbooks.md"
_PAGE: Final = Page(_NAME)
_PART: Final = re.compile(r"^\*\*(Alert|Look|Type|Over|Do not)\.?\*\*", re.MULTILINE)
_BLOCK: Final = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAUSE: Final = 0.02
"""Seconds between two requests of a client."""


class Playbook:
    """One section of the page: its alert, and the commands of each of its parts."""

    def __init__(self, heading: str) -> None:
        text = (ROOT / _NAME).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        _, *pieces = _PART.split(text)
        self.parts = dict(zip(pieces[::2], pieces[1::2], strict=True))
        assert [*self.parts] == ["Alert", "Look", "Type", "Over", "Do not"], heading
        self.alert = re.findall(r"`(Nerite\w+)`", self.parts["Alert"])[0]

    def commands(self, part: str) -> list[str]:
        """Return the commands of a part."""
        return [line for block in _BLOCK.findall(self.parts[part]) for line in block.splitlines()]


def with_names(text: str, router: Serving, members: Sequence[Serving]) -> str:
    """Return a text of the page with the addresses of processes of the test."""
    for name, each in (("localhost", router), *((f"gpu-{at}", each) for at, each in enumerate(members, 1))):
        text = text.replace(f"{name}:8000", each.http).replace(f"{name}:8002", f"127.0.0.1:{each.ports['Metrics']}")
    return text


class Platform:
    """A router with the files of the page, its members, and a Prometheus that reads them and evaluates the alerts."""

    def __init__(self, folder: Path, router: Serving, members: Sequence[Serving], prometheus: Prometheus) -> None:
        self.router = router
        self.prometheus = prometheus
        self._folder = folder
        self._members = members

    def enter(self, command: str, status: int = 0) -> str:
        """Run a command of the page; return what it printed. What it edits must have no mistakes."""
        said = run(with_names(command, self.router, self._members), cwd=self._folder, status=status)
        if command.endswith((".toml", ".txt")):
            run(_PAGE.block("nerite route --check"), cwd=self._folder)
        return said

    def pages(self, playbook: Playbook) -> None:
        """Wait for the alert."""
        eventually(lambda: bool(self.prometheus.firing(playbook.alert)), 75.0, f"{playbook.alert} does not fire")

    def is_over(self, playbook: Playbook) -> None:
        """Wait for the end of the alert."""
        eventually(lambda: not self.prometheus.firing(playbook.alert), what=f"{playbook.alert} still fires")

    def of_router(self, metric: str, **labels: str) -> float:
        """Return the sum of the samples of the router's metric that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = self.router.metrics().items()
        return sum(
            value for name, value in found if name.partition("{")[0] == metric and all(each in name for each in wanted)
        )


@contextmanager
def platform(
    folder: Path, members: Sequence[Serving], changes: Mapping[str, str] | None = None, count: int = 2
) -> Iterator[Platform]:
    """Run the router with the files of the page, and Prometheus. The first ``count`` servers are members at first.

    ``changes`` of the policy file: numbers for a small machine.
    """
    policy = _PAGE.block("# policy.toml")
    for old, new in (changes or {}).items():
        assert old in policy, old
        policy = policy.replace(old, new)
    (folder / "policy.toml").write_text(policy)
    (folder / "members.txt").write_text("".join(f"{each.http}\n" for each in members[:count]))
    cluster = _PAGE.block("# cluster.toml").replace("[router]\n", ROUTER) + 'health-interval = "200ms"\n'
    with routing(folder, cluster, router="") as router:
        targets = [f"127.0.0.1:{each.ports['Metrics']}" for each in (router, *members)]
        with prometheus_server(folder, targets, short_rules(folder), "500ms") as prometheus:
            yield Platform(folder, router, members, prometheus)


class PatientClients:
    """Clients that send one request after the other to a router, and give up after some seconds without an answer."""

    def __init__(self, count: int, router: Serving, path: str, body: bytes, patience: float = PATIENCE, **headers: str):
        self.found: Counter[int] = Counter()
        """How requests have ended, by status; 0: the client has given up."""
        self._over = threading.Event()
        self._lock = threading.Lock()
        send = (router, path, body, patience, {name.replace("_", "-"): value for name, value in headers.items()})
        self._threads = [threading.Thread(target=self._run, args=send) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, router: Serving, path: str, body: bytes, patience: float, headers: dict[str, str]) -> None:
        connection = http.client.HTTPConnection(router.http, timeout=patience)
        while not self._over.wait(_PAUSE):
            try:
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                answer.read()
                status = answer.status
            except TimeoutError:
                connection.close()
                status = 0
            with self._lock:
                self.found[status] += 1
        connection.close()

    def count(self, *statuses: int) -> int:
        """Return how many requests have ended so."""
        with self._lock:
            return sum(self.found[status] for status in statuses)

    def end(self) -> None:
        """Have them send no more, and wait for what is under way."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)


@contextmanager
def clients(
    count: int, router: Serving, path: str, body: bytes, patience: float = PATIENCE, **headers: str
) -> Iterator[PatientClients]:
    """Have so many clients at work meanwhile."""
    made = PatientClients(count, router, path, body, patience, **headers)
    try:
        yield made
    finally:
        made.end()
