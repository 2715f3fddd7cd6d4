"""What tests of the dispatcher have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dispatcher_bench import Bench
from doubles import FakeLoop
from nerite.dispatch import dispatcher as module


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    loop = FakeLoop()
    loop.rule(monkeypatch, module)
    yield Bench(loop)
