"""The sums of what replicas have counted are what one judge would have counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from nerite.config.rollout_spec import RolloutSpec
from nerite.judge.counts import CountRow
from nerite.judge.gates import parse_gate
from nerite.judge.judge import Judge
from nerite.judge.outcome import Outcome, Stratum
from nerite.observability.exposition import Page
from nerite.rollouts import metrics
from nerite.rollouts.fleet_counts import COUNTERS, INFO, FleetCounts, samples_of, table_of
from nerite.rollouts.fleet_order import FleetLead, FleetOrder
from nerite.rollouts.record import RolloutRecord
from nerite.rollouts.rollout import Rollout
from nerite.rollouts.run import RolloutRun

ID = "0123456789ab"
SPEC = RolloutSpec("2", "1", gates=("errors", "p99"))
MILLISECOND = 1_000_000
_LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")


def record() -> RolloutRecord:
    """Return a rollout that a fleet leads."""
    made = RolloutRecord("m")
    made.run = RolloutRun("m", ID, SPEC, "now")
    rollout = Rollout(SPEC)
    rollout.begin(0)
    made.run.lead = FleetLead(FleetOrder(ID, 1, 1, "now", rollout), 0)
    made.run.rollout.begin(0)
    return made


def outcomes(count: int, first: int = 0) -> Iterator[Outcome]:
    for number in range(first, first + count):
        candidate = number % 4 == 0
        stratum = Stratum(prompt=("<256", "<1k")[number % 2], tenant='a "tenant"', stream=number % 3 == 0)
        error = "error" if number % (8 if candidate else 40) == 0 else ""
        yield Outcome(candidate, 0.25, number * 50 * MILLISECOND, 1000.0, 1000.0, error=error, stratum=stratum)


def samples(of: RolloutRecord, boot: str) -> list[tuple[Mapping[str, str], float]]:
    """Return the samples of a metrics page, as Prometheus has them."""
    page = Page()
    metrics.write(page, [of], boot)
    found = []
    for name, labels, value in _LINE.findall(b"".join(page.pieces()).decode()):
        pairs = {key: text.replace('\\"', '"') for key, text in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)}
        found.append(({"__name__": name, **pairs}, float(value)))
    return found


def test_what_replicas_tell_is_what_their_metrics_page_has() -> None:
    told = record()
    observed(told, outcomes(200))
    assert told.run is not None
    table = json.loads(json.dumps(table_of(told.run.counts())))
    page = [(labels["boot"], value) for labels, value in samples(told, "b") if labels["__name__"] in COUNTERS]
    assert len(page) == len(list(samples_of(table, "b")))
    assert FleetCounts().take(samples_of(table, "b")) == FleetCounts().take(samples(told, "b"))


def observed(of: RolloutRecord, seen: Iterator[Outcome]) -> None:
    assert of.run is not None
    for outcome in seen:
        of.run.observe(outcome)


def total(rows: list[CountRow]) -> list[float]:
    return [round(sum(row[index] for row in rows), 6) for index in range(2, 8)]  # type: ignore[misc]


def test_the_sums_of_two_replicas_are_those_of_one_judge() -> None:
    one, other = record(), record()
    judge = Judge([parse_gate(text) for text in SPEC.gates])
    for each in outcomes(2000):
        judge.observe(each)
    # Each replica sees requests of its own; the same thresholds are learned from more of them, so errors are compared.
    observed(one, outcomes(1000))
    observed(other, outcomes(1000, first=1000))
    counts = FleetCounts()
    found = counts.take([*samples(one, "b1"), *samples(other, "b2")])
    expected = judge.counts()["errors"]
    assert total(found["errors"])[:4] == total(expected)[:4]
    assert {row.stratum for row in found["errors"]} == {row.stratum for row in expected}
    assert {row.probability for row in found["errors"]} == {0.25}


def test_only_what_is_new_is_returned() -> None:
    one = record()
    observed(one, outcomes(400))
    counts = FleetCounts()
    first = counts.take(samples(one, "b1"))["errors"]
    assert counts.take(samples(one, "b1")) == {}
    observed(one, outcomes(400, first=400))
    second = counts.take(samples(one, "b1"))["errors"]
    assert sum(row.candidate + row.baseline for row in first) == 400
    assert sum(row.candidate + row.baseline for row in second) == 400
    assert counts.take([]) == {}


def test_a_restart_with_the_state_counts_nothing_twice() -> None:
    one = record()
    observed(one, outcomes(400))
    counts = FleetCounts()
    counts.take(samples(one, "b1"))
    restored = RolloutRecord.of_json("m", one.as_json(), 400 * 50 * MILLISECOND)
    assert counts.take(samples(restored, "b2")) == {}
    observed(restored, outcomes(100, first=400))
    (rows,) = [counts.take(samples(restored, "b2"))["errors"]]
    assert sum(row.candidate + row.baseline for row in rows) == 100


def test_bad_events_of_sticky_keys_weigh_less_by_the_number_of_replicas() -> None:
    one = record()
    observed(one, outcomes(400))
    whole, third = FleetCounts().take(samples(one, "b1")), FleetCounts().take(samples(one, "b1"), keys=3)
    assert total(third["errors"])[:4] == total(whole["errors"])[:4]
    assert total(third["errors"])[4:] == [round(each / 3, 6) for each in total(whole["errors"])[4:]]


def test_samples_of_others_are_passed_over() -> None:
    good = {"__name__": COUNTERS[0], "boot": "b", "gate": "errors", "arm": "candidate", "probability": "0.5"}
    wrong = [
        {**good, "__name__": "up"},
        {**good, "arm": "third"},
        {**good, "probability": "1.0"},
        {**good, "probability": "often"},
        {key: value for key, value in good.items() if key != "boot"},
    ]
    assert FleetCounts().take([(each, 5.0) for each in wrong]) == {}
    assert FleetCounts().take([(good, float("nan"))]) == {}
    assert FleetCounts().take([(good, 5.0)])["errors"][0].candidate_bad == 5


def test_a_rollout_without_a_fleet_has_no_such_metrics() -> None:
    alone = record()
    assert alone.run is not None
    observed(alone, outcomes(100))
    names = {labels["__name__"] for labels, _ in samples(alone, "b")}
    assert {*COUNTERS, INFO} <= names
    alone.run.lead = None
    assert not {*COUNTERS, INFO} & {labels["__name__"] for labels, _ in samples(alone, "b")}
