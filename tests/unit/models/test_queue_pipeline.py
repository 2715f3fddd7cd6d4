"""Stages of a model version's queue: which there are, and in which order a request passes them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from doubles import FakeLoop
from nerite.admission.idempotency import IdempotentQueue
from nerite.admission.policy import parse_policy
from nerite.admission.queue import AdmissionQueue, EngineAdmissionQueue
from nerite.admission.tenants import TenantAdmission
from nerite.cache.frontend import ResponseCacheFrontend
from nerite.cache.local import LocalCache
from nerite.config.model_config import ModelConfig, ModelResponseCache
from nerite.config.options import QueueOptions
from nerite.core.signature import Signature
from nerite.dispatch.busy_poll import BusyPoll
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.instance_picker import AnyInstancePicker
from nerite.models.queue_pipeline import QueuePipeline
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.dynamic_batcher import DefaultScheduler
from nerite.scheduling.load_shedding import LoadShedder

CACHED = ModelResponseCache(enable=True)
SIGNATURE = Signature("m", 0, [], [])


def pipeline(policy: str | None = None, cache: bool = True, **config: Any) -> QueuePipeline:
    loop: Any = FakeLoop()
    statistics = VersionStatistics()
    dispatcher = Dispatcher(
        AnyInstancePicker(DefaultScheduler()),
        [],
        statistics,
        loop,
        BusyPoll(loop, 0.0),
        LoadShedder(QueueOptions(), "m"),
    )
    return QueuePipeline(
        ModelConfig(name="m", **config),
        SIGNATURE,
        dispatcher,
        statistics,
        TenantAdmission(None if policy is None else parse_policy(policy), loop),
        LocalCache(1 << 20) if cache else None,
        QueueOptions(),
    )


def test_a_model_without_extras_pays_for_none() -> None:
    bare = pipeline()
    assert bare.first is bare.scheduler
    assert bare.cache_frontend is bare.engine_admission is None


def test_a_policy_puts_admission_in_front() -> None:
    assert type(pipeline(policy="").first) is AdmissionQueue


def test_a_hit_needs_no_admission() -> None:
    cached = pipeline(policy="", response_cache=CACHED)
    assert isinstance(cached.first, ResponseCacheFrontend)
    assert cached.first is cached.cache_frontend


def test_an_engine_has_its_own_admission_with_or_without_a_policy() -> None:
    for policy in (None, ""):
        engine = pipeline(policy, backend="llm")
        assert isinstance(engine.first, IdempotentQueue)
        assert type(engine.engine_admission) is EngineAdmissionQueue


def test_keys_come_before_the_cache() -> None:
    engine = pipeline(backend="llm", response_cache=CACHED)
    assert isinstance(engine.first, IdempotentQueue)
    assert engine.cache_frontend is not None


def test_a_cache_that_the_server_lacks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nerite.repository"):
        uncached = pipeline(cache=False, response_cache=CACHED)
    assert uncached.first is uncached.scheduler
    assert "model 'm' enables the response cache, but the server has none" in caplog.text
