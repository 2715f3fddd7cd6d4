"""A Triton that ends by itself is started again, in the state it was in; a Nerite that ends is a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.compare import same
from conformance.exchange import get, infer
from conformance.exchanges.ensembles import rows
from conformance.exchanges.ensembles_explicit import INDEX, SCENE
from conformance.exchanges.repository_explicit import load
from conformance.stage import RESTARTS, Stage
from conformance.triton_installation import TritonUnavailable, installation

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    try:
        installation()
    except TritonUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"Triton cannot run here: {reason}")
    stage = Stage(tmp_path)
    stage.set(SCENE)
    yield stage
    stage.clear()


def kill(process_id: int) -> None:
    os.kill(process_id, 9)


def test_triton_ends(stage: Stage) -> None:
    first = stage.triton
    assert first is not None
    stage.ask_triton([load("diamond")])
    before = stage.ask_triton([INDEX, infer("diamond", rows(1))])
    kill(first.process.pid)
    after = stage.ask_triton([INDEX, infer("diamond", rows(1))])
    assert all(map(same, before, after))
    assert stage.triton is not first
    assert stage.restarts == 1


def test_triton_ends_again_and_again(stage: Stage) -> None:
    stage.restarts = RESTARTS
    assert stage.triton is not None
    kill(stage.triton.process.pid)
    with pytest.raises(RuntimeError, match="Triton ended with -9"):
        stage.ask_triton([INDEX])


def test_nerite_ends(stage: Stage) -> None:
    assert stage.nerite is not None
    stage.nerite.process.kill()
    stage.nerite.process.wait()
    with pytest.raises(ConnectionError):
        stage.ask_nerite([get("/v2/health/live")])
