"""The queue of a shadow: bounded in number and bytes."""

from __future__ import annotations

from nerite.scheduling.shadow_queue import MAX_BYTES, MAX_HELD, ShadowDrop, ShadowQueue


def queue(concurrency: int = 2) -> ShadowQueue[str]:
    return ShadowQueue(concurrency, patience_ns=100)


def test_the_number_is_bounded() -> None:
    full = queue()
    assert [full.hold(1) for _ in range(MAX_HELD)] == [None] * MAX_HELD
    assert full.hold(1) is ShadowDrop.QUEUE_FULL
    full.release(1)
    assert full.hold(1) is None


def test_the_bytes_are_bounded() -> None:
    full = queue()
    assert full.hold(MAX_BYTES - 10) is None
    assert full.hold(11) is ShadowDrop.BYTES
    assert full.hold(5) is None
    assert full.grow(5)
    assert not full.grow(1)
    full.release(10)
    assert (full.held, full.size) == (1, MAX_BYTES - 10)


def test_only_so_many_run_at_once() -> None:
    waiting = queue()
    for name in "abc":
        waiting.wait(name, 0)
    begun = []
    while (first := waiting.first) is not None:
        waiting.begin()
        begun.append(first)
    assert (begun, waiting.waiting) == (["a", "b"], 1)
    waiting.end()
    assert waiting.first == "c"


def test_who_waits_for_too_long_is_late() -> None:
    waiting = queue()
    waiting.wait("a", 0)
    waiting.wait("b", 50)
    assert waiting.late(99) == []
    assert waiting.late(100) == ["a"]
    assert waiting.drain() == ["b"]
    assert waiting.first is None
