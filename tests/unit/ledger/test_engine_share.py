"""How the steps of an engine are divided over its requests."""

from __future__ import annotations

from nerite.core.engine_report import EngineReport, RequestBegun
from nerite.ledger.engine_share import EngineShare, divide_step


def share(prompt: int = 10, cached: int = 0, answer: int = 0, sequences: int = 1) -> EngineShare:
    made = EngineShare(RequestBegun(0, prompt, cached, sequences))
    made.answer_tokens = answer
    return made


def test_a_step_is_divided_by_tokens() -> None:
    old, wide, new = share(answer=5), share(answer=6, sequences=2), share(prompt=100, cached=93)
    divide_step(1000, EngineReport(running=4), [(old, 1), (wide, 2), (new, 1)])
    assert (old.decode_ns, wide.decode_ns, new.prefill_ns) == (100, 200, 700)
    assert (old.prefill_ns, wide.prefill_ns, new.decode_ns) == (0, 0, 0)


def test_nothing_is_lost_by_rounding() -> None:
    shares = [share(answer=1) for _ in range(7)]
    divide_step(100, EngineReport(running=7), [(each, 1) for each in shares])
    assert sum(each.busy_ns for each in shares) == 100


def test_a_prompt_that_is_read_in_several_steps_takes_part_before_its_first_token() -> None:
    old, new, waiting = share(answer=1), share(prompt=9), share(prompt=50)
    divide_step(100, EngineReport(running=2), [(old, 1), (new, 0), (waiting, 0)])
    assert (old.busy_ns, new.busy_ns, waiting.busy_ns) == (10, 90, 0)


def test_somebody_pays_for_a_step_without_tokens() -> None:
    first, second = share(prompt=5), share(prompt=5)
    divide_step(100, EngineReport(running=0), [(first, 0), (second, 0)])
    assert first.prefill_ns + second.prefill_ns == 100
    decoding = [share(answer=3), share(answer=4)]
    divide_step(100, EngineReport(), [(each, 0) for each in decoding])
    assert [each.decode_ns for each in decoding] == [50, 50]


def test_a_cached_prompt_costs_its_last_token() -> None:
    assert share(prompt=64, cached=64).unread_tokens == 1


def test_blocks_are_held_from_the_beginning_to_the_end() -> None:
    it = share(prompt=30)
    it.advance(2, 16, 10)
    assert it.kv_block_ns == 2 * 10
    it.advance(1, 16, 15)
    assert it.kv_block_ns == 20 + 2 * 5
    it.advance(0, 16, 20)
    assert (it.kv_block_ns, it.answer_tokens) == (30 + 3 * 5, 3)
