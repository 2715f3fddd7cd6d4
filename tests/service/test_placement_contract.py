"""Models placed on servers that do what Triton's contract says: strict readiness, and unloads that take a while."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from routing import Received, StandInMember, pool, response, routing, samples
from serving import PATIENCE, Serving, eventually

PLACEMENT = '[pool.placement]\nmemory = "2GiB"\nmodel-memory = "1GiB"\nhold = "100ms"\nrise = "500ms"\n'
NAMES = ("a", "b", "c")


class TritonMember(StandInMember):
    """A server with Triton's repository API. Loads and unloads wait for the test if it says so."""

    def __init__(self) -> None:
        self.states: dict[str, tuple[str, str]] = {}
        """State and reason of each model that was ever loaded."""
        self.slow: set[str] = set()
        """Models whose loads and unloads end when ``let_go`` is set."""
        self.let_go = threading.Event()
        self.orders: list[str] = []
        self.checks = 0
        super().__init__(self._answer)

    def _index(self) -> bytes:
        rows: list[dict[str, str]] = []
        for name in NAMES:
            state, reason = self.states.get(name, ("", ""))
            row = {"name": name}
            if state:
                row |= {"version": "1", "state": state}
            if reason:
                row["reason"] = reason
            rows.append(row)
        return json.dumps(rows).encode()

    def _healthy(self, request: Received) -> bytes | None:
        if request.path == "/v2/health/ready":
            strict = all(state == "READY" or reason == "unloaded" for state, reason in self.states.values())
            return response(status=200 if strict else 400)
        if request.path == "/v2/repository/index":
            self.checks += 1
            return response(self._index())
        return None

    def _answer(self, asked: Received, connection: Any) -> bytes:
        _, _, *parts = asked.path.split("/")
        if parts[0] == "repository":
            _, _, model, step = parts
            self.orders.append(f"{step} {model}")
            return self._load(model) if step == "load" else self._unload(model)
        if self.states.get(parts[1], ("", ""))[0] == "READY":
            return response(asked.body)
        text = f"Request for unknown model: '{parts[1]}' has no available versions"
        return response(json.dumps({"error": text}).encode(), status=404)

    def _load(self, model: str) -> bytes:
        self.states[model] = ("LOADING", "")
        if model in self.slow:
            self.let_go.wait(PATIENCE)
        self.states[model] = ("READY", "")
        return response(b"")

    def _unload(self, model: str) -> bytes:
        def end() -> None:
            if model in self.slow:
                self.let_go.wait(PATIENCE)
            self.states[model] = ("UNAVAILABLE", "unloaded")

        self.states[model] = ("UNLOADING", "")
        threading.Thread(target=end, daemon=True).start()
        return response(b"")


@contextmanager
def placed(folder: Path) -> Iterator[tuple[TritonMember, Serving]]:
    member = TritonMember()
    try:
        with routing(folder, pool(member.address, kind="triton") + PLACEMENT) as router:
            yield member, router
    finally:
        member.let_go.set()
        member.stop()


def ask(router: Serving, model: str) -> tuple[int, bytes]:
    status, _, body = router.ask("POST", f"/v2/models/{model}/infer", b'{"inputs":[]}')
    return status, body


OK = (200, b'{"inputs":[]}')


def test_a_server_that_loads_a_model_serves_the_others(tmp_path: Path) -> None:
    with placed(tmp_path) as (member, router):
        assert ask(router, "a") == OK
        member.slow.add("b")
        answers: list[object] = []
        asker = threading.Thread(target=lambda: answers.append(ask(router, "b")))
        asker.start()
        eventually(lambda: member.states.get("b") == ("LOADING", ""))
        seen = member.checks
        eventually(lambda: member.checks > seen + 2)
        assert ask(router, "a") == OK
        assert samples(router, "nerite_router_members_ready")['nerite_router_members_ready{pool="main"}'] == 1
        assert answers == []
        member.let_go.set()
        asker.join(PATIENCE)
        assert answers == [OK]


def test_memory_is_free_when_the_index_says_so(tmp_path: Path) -> None:
    with placed(tmp_path) as (member, router):
        assert ask(router, "a") == OK
        assert ask(router, "b") == OK
        member.slow |= {"a", "b"}
        answers: list[object] = []
        asker = threading.Thread(target=lambda: answers.append(ask(router, "c")))
        asker.start()
        eventually(lambda: len(member.orders) == 3)
        assert member.orders[:2] == ["load a", "load b"]
        assert member.orders[2].startswith("unload ")
        unloaded = member.orders[2][-1]
        eventually(lambda: f"has unloaded model '{unloaded}'" in router.text)
        assert len(member.orders) == 3, "the memory is not free yet"
        member.let_go.set()
        asker.join(PATIENCE)
        assert answers == [OK]
        assert member.orders[3] == "load c"


def test_a_model_that_somebody_else_unloads(tmp_path: Path) -> None:
    with placed(tmp_path) as (member, router):
        assert ask(router, "a") == OK
        member.states["a"] = ("UNAVAILABLE", "unloaded")
        assert ask(router, "a") == OK
        assert member.orders == ["load a", "load a"]
