"""Idempotency keys of a model that has a response cache, too: a key keeps its promise wherever an answer comes from."""

from __future__ import annotations

from typing import Any

import pytest
from test_idempotency_registry import SECOND, Desk

from nerite.cache.frontend import ResponseCacheFrontend
from nerite.cache.local import LocalCache
from nerite.core.errors import KeyReused, NeriteError
from nerite.core.queue_stage import QueueStage
from nerite.core.request import NAME, InferenceRequest
from nerite.observability.statistics import VersionStatistics

RATED = """
[default]
requests_per_minute = 2
"""


class Cached(Desk):
    """A desk with a response cache between it and the turnstile."""

    def in_front(self, admission_queue: QueueStage) -> QueueStage:
        self.frontend = ResponseCacheFrontend(
            LocalCache(1 << 20), admission_queue, VersionStatistics(), ["text_output"]
        )
        self.frontend.renew(lambda: "llm/1/1")
        return self.frontend

    def answered(self, text: bytes, key: str | None = "k", **asked: Any) -> InferenceRequest:
        """Have the model answer a request."""
        request = self.asked(key, **asked)
        self.say(text, final=True)
        return request

    @property
    def generations(self) -> int:
        return len(self.engine.has)

    def error_of(self, key: str | None, **asked: Any) -> NeriteError | None:
        return self.error(self.asked(key, **asked))


@pytest.fixture
def bls_server(monkeypatch: pytest.MonkeyPatch) -> Cached:
    return Cached(monkeypatch)


def test_the_key_of_another_request_whose_answer_the_cache_has(bls_server: Cached) -> None:
    bls_server.answered(b"twice upon", None, prompt=b"twice")
    bls_server.answered(b"once upon", "k", prompt=b"once")
    assert isinstance(bls_server.error_of("k", prompt=b"twice"), KeyReused)
    assert bls_server.error_of("k", prompt=b"once") is None


def test_a_key_is_kept_though_the_cache_had_the_answer(bls_server: Cached) -> None:
    bls_server.answered(b"once upon", None, prompt=b"once")
    first = bls_server.asked("k", prompt=b"once")
    assert (bls_server.heard(first), bls_server.generations) == (b"once upon", 1)
    assert isinstance(bls_server.error_of("k", prompt=b"twice"), KeyReused)
    again = bls_server.asked("k", prompt=b"once")
    assert (bls_server.heard(again), bls_server.generations) == (b"once upon", 1)


def test_an_answer_from_the_cache_outlives_its_entry(bls_server: Cached) -> None:
    bls_server.answered(b"once upon", None, prompt=b"once")
    bls_server.asked("k", prompt=b"once")
    bls_server.frontend.renew(lambda: "llm/1/2")  # as after a reload: nothing of before is in it
    again = bls_server.asked("k", prompt=b"once")
    assert (bls_server.heard(again), bls_server.generations) == (b"once upon", 1)


def test_one_generation_for_two_keys_also_if_the_first_client_goes(bls_server: Cached) -> None:
    first, second = bls_server.asked("one"), bls_server.asked("two")
    first.cancel()
    bls_server.say(b"all", final=True)
    assert (bls_server.heard(second), bls_server.generations) == (b"all", 1)
    assert bls_server.heard(bls_server.asked("one")) == b"all."


def test_nobody_is_charged_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    bls_server = Cached(monkeypatch, RATED)
    bls_server.answered(b"all")
    for key in ("k", "k", "other", "other", None):
        assert bls_server.error_of(key) is None
    use = bls_server.use("default")
    assert (bls_server.generations, use.offered, use.joined) == (1, 1, 3)
    bls_server.loop.advance(31 * SECOND)
    assert bls_server.error_of("k") is None
    assert bls_server.generations == 1, "the key is forgotten, and the cache has it"


def test_a_key_in_a_parameter_is_no_part_of_the_question(bls_server: Cached) -> None:
    bls_server.answered(b"all", None, parameters={NAME: "one"})
    assert bls_server.heard(bls_server.asked(None, parameters={NAME: "two"})) == b"all"
    assert bls_server.heard(bls_server.asked(None)) == b"all"
    assert bls_server.error_of("one") is None, "as a header it is the same key"
    assert bls_server.generations == 1
