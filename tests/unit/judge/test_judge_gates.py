from __future__ import annotations

import pytest

from nerite.judge.gates import FORMS, GateError, LimitGate, RateGate, TailGate, parse_gate


@pytest.mark.parametrize(
    ("text", "name", "margin", "floor"),
    [
        ("errors", "errors", 0.5, 0.001),
        ("errors=+100%", "errors", 1.0, 0.001),
        ("errors=+50%,1%", "errors", 0.5, 0.01),
        ("refused=+20%", "refused", 0.2, 0.001),
        ("cancelled", "cancelled", 0.5, 0.001),
        ("goodput", "goodput", 0.25, 0.001),
        (" goodput = +30% ", "goodput", 0.3, 0.001),
    ],
)
def test_rates(text: str, name: str, margin: float, floor: float) -> None:
    gate = parse_gate(text)
    assert isinstance(gate, RateGate)
    assert (gate.name, gate.objectives) == (name, ())
    assert (gate.margin, gate.floor) == pytest.approx((margin, floor))
    assert gate.tolerated == pytest.approx(1 + margin)


@pytest.mark.parametrize(
    ("text", "field", "quantile", "margin"),
    [
        ("p99", "latency_us", 0.99, 0.1),
        ("p99.9=+25%", "latency_us", 0.999, 0.25),
        ("latency_p50", "latency_us", 0.5, 0.1),
        ("ttft", "first_us", 0.95, 0.1),
        ("ttft_p99=+5%", "first_us", 0.99, 0.05),
        ("itl=+10%", "token_us", 0.95, 0.1),
    ],
)
def test_tails(text: str, field: str, quantile: float, margin: float) -> None:
    gate = parse_gate(text)
    assert isinstance(gate, TailGate)
    assert gate.field == field
    assert (gate.quantile, gate.margin) == pytest.approx((quantile, margin))
    assert gate.tolerated == 1
    assert gate.learned == ((field, gate.quantile),)


def test_objectives_of_goodput() -> None:
    gate = parse_gate("goodput:ttft<=500ms:itl<=40ms:latency<=10s=+20%")
    assert isinstance(gate, RateGate)
    assert gate.objectives == (("first_us", 500e3), ("token_us", 40e3), ("latency_us", 10e6))
    assert gate.margin == pytest.approx(0.2)
    assert gate.learned == ()
    assert len(parse_gate("goodput").learned) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "limit", "relative"),
    [
        ("kv_headroom>=10%", 0.1, False),
        ("memory<=16GiB", 16 * 2**30, False),
        ("memory<=+20%", 0.2, True),
        ("restarts<=0", 0, False),
    ],
)
def test_limits(text: str, limit: float, relative: bool) -> None:
    gate = parse_gate(text)
    assert isinstance(gate, LimitGate)
    assert (gate.limit, gate.relative) == pytest.approx((limit, relative))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "unknown"),
        ("error", "unknown"),
        ("p100", "unknown"),
        ("p49", "at least p50"),
        ("p99=10%", "no margin such as"),
        ("p99=", "no margin such as"),
        ("errors=+0%", "a margin is more than 0 %"),
        ("errors=+2000%", "at most 1000 %"),
        ("errors=+5%,100%", "between 0 % and 100 %"),
        ("p99=+5%,1%", "only rates"),
        ("errors:ttft<=5ms", "no objectives"),
        ("goodput:ttft<5ms", "no objective such as"),
        ("goodput:ttft<=5", "no objective such as"),
        ("kv_headroom<=10%", "bounded from below"),
        ("kv_headroom>=10", "a percentage"),
        ("memory>=1GiB", "bounded from above"),
        ("memory<=20%", "in bytes, or relative"),
        ("restarts<=1%", "a number"),
    ],
)
def test_what_is_no_gate_is_named_with_the_forms_there_are(text: str, why: str) -> None:
    with pytest.raises(GateError) as caught:
        parse_gate(text)
    assert repr(text) in str(caught.value)
    assert why in str(caught.value)
    assert FORMS in str(caught.value)


def test_a_long_text_is_cut() -> None:
    with pytest.raises(GateError) as caught:
        parse_gate("x" * 100_000)
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    ("text", "candidate", "baseline", "violated"),
    [
        ("kv_headroom>=10%", 0.05, 0.3, True),
        ("kv_headroom>=10%", 0.10, 0.3, False),
        ("kv_headroom>=10%", 0.05, 0.04, False),
        ("memory<=+20%", 121, 100, True),
        ("memory<=+20%", 119, 100, False),
        ("memory<=100B", 101, 50, True),
        ("memory<=100B", 101, 120, False),
        ("memory<=100B", 101, float("nan"), True),
        ("restarts<=0", 1, 0, True),
        ("restarts<=0", 1, 1, False),
    ],
)
def test_a_limit_is_violated_by_a_candidate_that_is_worse(
    text: str, candidate: float, baseline: float, violated: bool
) -> None:
    gate = parse_gate(text)
    assert isinstance(gate, LimitGate)
    assert gate.violated(candidate, baseline) == violated
