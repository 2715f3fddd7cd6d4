"""The differential exam: the same questions to Triton and to Nerite, and the same answers.

Needs Triton, which is installed on first use (see ``triton_installation.py``); where it cannot run the exam is
skipped, except in CI, where that is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance.ask import Answer
from conformance.compare import same, told
from conformance.differences import NEVER, brief, by_exchange
from conformance.stage import Stage
from conformance.topics import Topic, topics
from conformance.triton_installation import TritonUnavailable, installation

pytestmark = pytest.mark.timeout(600)

ALLOWED = by_exchange()
CASES = [(topic, name) for topic in topics() for name in topic.exchanges]


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
    stage.set(topic.scene)
    if ALLOWED.get(exchange, ("", ""))[0] == NEVER:
        assert brief(stage.ask_nerite(steps)[0]).startswith(ALLOWED[exchange][1])
        return
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(stage.ask_triton, steps)
        ours = stage.ask_nerite(steps)
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
