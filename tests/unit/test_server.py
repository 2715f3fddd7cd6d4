"""What the server says of its models, by what the manager knows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from doubles import Caller, request
from nerite.config.options import ServerOptions
from nerite.core.errors import Unavailable
from nerite.repository.catalogue import ModelRecord
from nerite.repository.version_state import ModelState, VersionState
from nerite.server import InferenceServer

READY = VersionState(ModelState.READY)
UNLOADED = VersionState(ModelState.UNAVAILABLE, "unloaded")


class Running:
    """A version whose instances are ready."""

    def ask_ready(self, answered: Callable[[bool], None]) -> None:
        answered(True)


class FakeManager:
    unread = False

    def __init__(self) -> None:
        self.known: dict[str, ModelRecord] = {}

    @property
    def records(self) -> list[ModelRecord]:
        return list(self.known.values())


class Bench:
    def __init__(self) -> None:
        self.manager: Any = FakeManager()
        self.server = InferenceServer(ServerOptions(), lambda server, on_change: self.manager)
        self.server.started()

    def model(self, name: str, *, unreadable: str = "", **states: VersionState) -> None:
        """Add a model with versions ``v1``, ``v2`` … in these states."""
        record = ModelRecord(name, unreadable=unreadable)
        for version, state in states.items():
            record.states[int(version[1:])] = state
            if state.state is ModelState.READY:
                running: Any = Running()
                record.running[int(version[1:])] = running
        self.manager.known[name] = record

    def ready(self) -> bool:
        answers: list[bool] = []
        self.server.ask_ready(answers.append)
        (answer,) = answers
        return answer


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        (READY, True),
        (UNLOADED, True),
        (VersionState(ModelState.UNAVAILABLE, "Internal: why"), False),
        (VersionState(ModelState.LOADING), False),
        (VersionState(ModelState.UNLOADING), True),
    ],
)
def test_ready_by_the_state_of_a_version(bench: Bench, state: VersionState, ready: bool) -> None:
    bench.model("a", v1=READY, v2=state)
    assert bench.ready() is ready


def test_ready_although_a_model_cannot_be_read(bench: Bench) -> None:
    bench.model("a", v1=READY)
    bench.model("b", unreadable="config.pbtxt:1:1: what is this")
    assert bench.ready()


def test_a_server_that_is_to_stop_is_not_ready_and_answers(bench: Bench) -> None:
    bench.server.announce_stop()
    assert not bench.ready()
    assert bench.server.live


def test_a_request_to_a_server_that_stops_may_be_sent_again(bench: Bench) -> None:
    bench.server.stop_accepting()
    caller = Caller()
    bench.server.infer(request(sink=caller))
    ((_, response, final),) = caller.answers
    assert final
    assert isinstance(response.error, Unavailable)
    assert response.error.message.startswith("Server is stopping")
    assert response.error.retry_after == 1
