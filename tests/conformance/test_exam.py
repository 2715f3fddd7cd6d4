"""The differential exam: the same questions to Triton and to Nerite, and the same answers.

Needs Triton, which is installed on first use (see ``triton.py``); where it cannot run the exam is skipped, except
in CI, where that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.ask import Answer, ask
from conformance.compare import same, told, without_hashes
from conformance.differences import NEVER, brief, by_exchange
from conformance.exchange import Scene
from conformance.servers import Server, start_nerite, start_triton
from conformance.topics import Topic, topics
from conformance.triton import TritonUnavailable, installation

pytestmark = pytest.mark.timeout(600)

ALLOWED = by_exchange()
CASES = [(topic, name) for topic in topics() for name in topic.exchanges]


@dataclass(frozen=True)
class Pair:
    triton: Server
    nerite: Server


class Stage:
    """Holds the two servers of one scene, and changes them when another scene is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scene: Scene | None = None
        self.pair: Pair | None = None
        self.running = ExitStack()

    def set(self, scene: Scene) -> Pair:
        """Return both servers, in this scene. Raises ``RuntimeError`` where one does not start."""
        if scene != self.scene:
            self.clear()
            self.scene = scene
            triton = start_triton(scene, self.folder / scene.name / "triton")
            self.running.callback(triton.stop)
            nerite = start_nerite(scene, self.folder / scene.name / "nerite")
            self.running.callback(nerite.stop)
            nerite.wait()
            triton.wait()
            self.pair = Pair(triton, nerite)
        if self.pair is None:
            raise RuntimeError(f"the servers of the scene {scene.name} did not start, as said above")
        return self.pair

    def clear(self) -> None:
        """Stop the servers that run."""
        self.pair = None
        self.running.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    try:
        installation()
    except TritonUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"Triton cannot run here: {reason}")
    stage = Stage(tmp_path_factory.mktemp("exam"))
    yield stage
    stage.clear()


@pytest.mark.parametrize(("topic", "name"), CASES, ids=[f"{topic.name}/{name}" for topic, name in CASES])
def test_same_answers(stage: Stage, topic: Topic, name: str) -> None:
    """Ask both servers, and fail unless they answer alike or as the list of differences says."""
    exchange, steps = f"{topic.name}/{name}", topic.exchanges[name]
    pair = stage.set(topic.scene)
    if ALLOWED.get(exchange, ("", ""))[0] == NEVER:
        assert brief(ask(pair.nerite, steps)[0]).startswith(ALLOWED[exchange][1])
        return
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, pair.triton, steps)
        ours = [without_hashes(answer) for answer in ask(pair.nerite, steps)]
        theirs = asked.result()
    if exchange in ALLOWED:
        check_difference(exchange, theirs[0], ours[0])
        return
    assert len(theirs) == len(ours)
    for number, (expected, answer) in enumerate(zip(theirs, ours, strict=True), start=1):
        if f"{exchange}#{number}" in ALLOWED:
            check_difference(f"{exchange}#{number}", expected, answer)
        elif not same(expected, answer):
            pytest.fail(f"answer {number} of {len(theirs)}\n{told(expected, answer)}", pytrace=False)


def check_difference(key: str, expected: Answer, answer: Answer) -> None:
    """Fail unless the two answers are otherwise in the way that the list of differences says."""
    assert not same(expected, answer), f"no longer different: take {key} out of differences/"
    assert brief(expected).startswith(ALLOWED[key][0])
    assert brief(answer).startswith(ALLOWED[key][1])
