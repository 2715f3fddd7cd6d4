"""Where a thread runs once it has settled down."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from nerite.core.thread_binding import bind_to_place

T = TypeVar("T")


def elsewhere(what: Callable[[], T]) -> T:
    """What a thread of its own comes to."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(what()))
    thread.start()
    thread.join()
    return results[0]


def test_a_thread_and_what_it_starts_run_on_the_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)

    def settled() -> tuple[str, set[int]]:
        return bind_to_place((core,), -1), elsewhere(lambda: os.sched_getaffinity(0))

    assert elsewhere(settled) == ("", {core})
    assert os.sched_getaffinity(0) == before


def test_no_cores_and_no_node_change_nothing() -> None:
    before = os.sched_getaffinity(0)
    assert elsewhere(lambda: (bind_to_place((), -1), os.sched_getaffinity(0))) == ("", before)


def test_memory_of_a_node_that_is_not_there() -> None:
    refusal = elsewhere(lambda: bind_to_place((), 1000))
    assert refusal.startswith("memory may be from any NUMA node, not from node 1000 alone: set_mempolicy was refused (")


def test_an_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert bind_to_place((), 0).endswith("it is not known how to ask for that on vax")
