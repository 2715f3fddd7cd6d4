"""What is traced: layers of settings, and which requests a layer chooses."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.config.options import OpenTelemetryOptions, TraceOptions
from nerite.core.errors import InvalidArgument
from nerite.observability.trace import Sampler, TraceSettings, TraceValues

ON = frozenset({"TIMESTAMPS"})


def settings(**given: Any) -> TraceSettings:
    return TraceSettings(TraceOptions(**{"levels": ("TIMESTAMPS",), "file": "t", **given}), lambda: None)


def chosen(sampler: Sampler, asked: int) -> list[int]:
    return [number for number in range(1, asked + 1) if sampler.choose()]


@pytest.mark.parametrize(
    ("rate", "count", "expected"),
    [(1, -1, [1, 2, 3, 4, 5, 6]), (2, -1, [2, 4, 6]), (2, 2, [2, 4]), (1, 0, []), (0, -1, []), (7, -1, [])],
)
def test_every_so_many_and_so_many_in_all(rate: int, count: int, expected: list[int]) -> None:
    assert chosen(Sampler(TraceValues(ON, rate, count, 0)), 6) == expected


def test_nothing_is_chosen_at_level_off() -> None:
    assert chosen(Sampler(TraceValues(frozenset(), 1, -1, 0)), 3) == []


def test_a_model_is_part_of_all_until_something_is_set_for_it() -> None:
    traced = settings(rate=1)
    assert traced.sampler("a") is traced.sampler("b") is traced.sampler("")
    traced.update("a", {"rate": 2})
    assert traced.sampler("a").values.rate == 2
    assert traced.sampler("b") is traced.sampler("")
    traced.update("a", {"rate": None})
    assert traced.sampler("a") is traced.sampler("")


def test_what_a_model_has_not_comes_from_all_and_then_from_the_start() -> None:
    traced = settings(rate=10)
    traced.update("a", {"log_frequency": 5})
    traced.update("", {"rate": 20})
    assert (traced.sampler("a").values.rate, traced.sampler("a").values.log_frequency) == (20, 5)
    traced.update("", {"rate": None})
    assert (traced.sampler("a").values.rate, traced.sampler("a").values.log_frequency) == (10, 5)


def test_what_is_left_of_a_count_stays_when_something_else_changes() -> None:
    traced = settings(rate=1, count=9)
    traced.update("a", {"count": 3})
    traced.sampler("a").choose()
    traced.update("a", {"rate": 2})
    assert traced.sampler("a").values.count == 2
    traced.sampler("").choose()
    traced.update("", {"rate": 1})
    assert traced.sampler("").values.count == 9


def test_a_count_that_a_model_has_used_up_keeps_nobody_from_changing_the_others() -> None:
    traced = settings(rate=1, count=9)
    traced.update("a", {"levels": ON, "count": 1})
    assert traced.sampler("a").choose() and not traced.sampler("a").choose()
    traced.update("", {"levels": frozenset()})
    assert traced.sampler("").values.levels == frozenset()
    assert not traced.sampler("a").choose(), "nor does it begin again"
    with pytest.raises(InvalidArgument, match="invalid trace setting"):
        traced.update("a", {"rate": 2})


def test_an_update_is_done_as_a_whole_or_not_at_all() -> None:
    changes = []
    traced = TraceSettings(TraceOptions(levels=("TIMESTAMPS",), file="t"), lambda: changes.append(1))
    traced.update("", {"levels": frozenset()})
    traced.update("a", {"levels": ON, "rate": 3})
    before = traced.current(""), traced.current("a")
    with pytest.raises(InvalidArgument, match="sample rate must be non-zero"):
        traced.update("a", {"count": 5, "rate": 0})
    traced.update("a", {"rate": None})
    with pytest.raises(InvalidArgument, match="sample rate must be non-zero"):
        traced.update("", {"rate": 0})
    traced.update("a", {"rate": 3})
    assert (traced.current(""), traced.current("a")) == before
    assert len(changes) == 4


@pytest.mark.parametrize(
    ("given", "update", "reason"),
    [
        ({"file": ""}, {"rate": 1}, "trace file name is not given"),
        ({"file": ""}, {"rate": 0}, "sample rate must be non-zero"),
        ({}, {"count": 0}, ""),
    ],
)
def test_what_cannot_be(given: dict[str, Any], update: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        settings(**given).update("", update)
    assert caught.value.message == f"Attempting to set invalid trace setting :{reason}"


def test_told() -> None:
    assert settings(levels=("TENSORS", "TIMESTAMPS")).current("") == [
        ("trace_level", ["TIMESTAMPS", "TENSORS"]),
        ("trace_rate", "1000"),
        ("trace_count", "-1"),
        ("log_frequency", "0"),
        ("trace_file", "t"),
        ("trace_mode", "triton"),
    ]


def test_told_of_a_collector() -> None:
    telemetry = OpenTelemetryOptions(url="u", resource={"service.name": "triton-inference-server", "a": "b", "c": "d"})
    traced = settings(mode="opentelemetry", levels=(), opentelemetry=telemetry)
    assert traced.levels == {"TIMESTAMPS"}
    assert traced.current("")[3:8] == [
        ("trace_mode", "opentelemetry"),
        ("resource", "a=b"),
        ("resource", "c=d"),
        ("url", "u"),
        ("bsp_max_queue_size", "2048"),
    ]
