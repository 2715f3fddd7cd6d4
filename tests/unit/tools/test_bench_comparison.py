"""Comparison of reports: what is beyond the noise, what is not, and what cannot be compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.tools.bench import comparison
from nerite.tools.bench.noise import change, critical, half_width
from nerite.tools.bench.provenance import Provenance, command_line


def test_confidence_intervals() -> None:
    assert half_width([5.0]) == 0
    # Mean 10, deviation 1, three values: 4.303 / sqrt(3).
    assert half_width([9.0, 10.0, 11.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert critical(2.9) == critical(2) == 4.303
    assert critical(0.5) == 12.706
    assert 1.96 < critical(100) < critical(31) < critical(30) == 2.042


def test_a_mean_is_in_its_interval_nineteen_times_of_twenty() -> None:
    generator = np.random.default_rng(0)
    samples = generator.normal(10, 1, (2_000, 4)).tolist()
    inside = sum(abs(sum(sample) / 4 - 10) <= half_width(sample) for sample in samples)
    assert inside / 2_000 == pytest.approx(0.95, abs=0.02)


def test_equal_means_seldom_differ_beyond_the_noise() -> None:
    generator = np.random.default_rng(0)
    pairs = generator.normal(10, [[1.0], [3.0]], (2_000, 2, 3)).tolist()
    beyond = sum(change(one, other).beyond_noise for one, other in pairs)
    assert beyond / 2_000 < 0.05


def test_changes() -> None:
    found = change([99.0, 100.0, 101.0], [109.0, 110.0, 111.0])
    assert found.percent == pytest.approx(10) and found.beyond_noise
    assert not change([90.0, 100.0, 110.0], [95.0, 105.0, 115.0]).beyond_noise
    assert not change([100.0], [200.0, 200.0]).beyond_noise
    assert change([1.0, 1.0], [2.0, 2.0]).beyond_noise
    assert change([0.0, 0.0], [2.0, 2.0]).percent == math.inf
    assert change([0.0, 0.0], [0.0, 0.0]).percent == 0


def document(rates: tuple[float, ...], p99: float = 5.0, concurrency: int = 4, **more: Any) -> dict[str, Any]:
    windows = [{"seconds": 1, "requests_per_second": rate, "p99_latency_ms": p99 + at} for at, rate in enumerate(rates)]
    level = {
        "concurrency": concurrency,
        "requests_per_second": sum(rates) / len(rates),
        "latency_ms": {"p99": p99},
        "failed": 0,
        # The first is one of those that did not agree yet.
        "windows": [{"seconds": 1, "requests_per_second": 1.0}, *windows],
        "counted_windows": len(rates),
    }
    origin = Provenance("nerite bench m", "today", "nerite 1", {"cores": 2}, "here:80", "nerite 1").to_json()
    return {"model": "m", "provenance": origin, "levels": [level | more]}


def verdicts(one: dict[str, Any], other: dict[str, Any]) -> dict[str, str]:
    sides = [comparison.side_of(name, [each]) for name, each in (("one", one), ("other", other))]
    return {found.figure: found.verdict for found in comparison.compared(*sides)}


def test_more_throughput_is_better_and_more_latency_is_worse() -> None:
    before, after = document((99, 100, 101)), document((119, 120, 121), p99=50.0)
    assert verdicts(before, after) == {"requests_per_second": "better", "p99_latency_ms": "worse"}
    assert verdicts(after, before) == {"requests_per_second": "worse", "p99_latency_ms": "better"}


def test_what_may_be_chance_is_noise() -> None:
    assert set(verdicts(document((80, 100, 120)), document((90, 110, 130))).values()) == {"noise"}


def test_one_value_tells_nothing() -> None:
    assert verdicts(document((100,)), document((200,)))["requests_per_second"] == "unknown"


def test_repeated_runs_are_compared_instead_of_windows() -> None:
    before = comparison.side_of("before", [document((rate, rate)) for rate in (90.0, 110.0)])
    after = comparison.side_of("after", [document((rate, rate)) for rate in (95.0, 115.0)])
    assert comparison.compared(before, after)[0].verdict == "noise"
    assert verdicts(document((90, 90.1)), document((95, 95.1)))["requests_per_second"] == "better"


def written(folder: Path, **documents: dict[str, Any]) -> list[str]:
    for name, each in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(each))
    return [str(folder / f"{name}.json") for name in documents]


def test_the_command_tells_figures_and_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = document((119, 120, 121), failed=3, stable=False)
    after["provenance"]["machine"]["cores"] = 8
    files = written(tmp_path, before=document((99, 100, 101)), after=after)
    page = tmp_path / "page.html"
    assert comparison.run([*files, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "| concurrency 4 | requests/s | 100 ± 2.48 | 120 ± 2.48 | +20.0 % | better" in said
    assert "The machines differ: cores 2 and 8." in said
    assert "Not stable in after: concurrency 4." in said
    assert "3 requests failed in after at concurrency 4" in said
    assert "Command: nerite bench m" in said and "Server: here:80, nerite 1" in said
    text = page.read_text()
    assert text.count('class="bars"') == 2 and text.count("<u style") == 4
    assert "nerite bench m" in text and "The machines differ" in text


def test_several_reports_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, a=document((99, 100, 101)), b=document((99, 100, 101)), c=document((199, 200, 201)))
    assert comparison.run(files) == 0
    said = capsys.readouterr().out
    assert "Before: a. After: b." in said and "Before: a. After: c." in said
    assert comparison.run([f"{files[0]},{files[1]}", files[2]]) == 0
    assert "Before: a + b. After: c." in capsys.readouterr().out


@pytest.mark.parametrize(
    "contents, said",
    [
        ([document((1, 2)), document((1, 2), concurrency=8)], "have no level of load in common"),
        ([document((1, 2)), {"levels": []}], "b.json is not a report: write one with nerite bench MODEL --json"),
        ([document((1, 2)), [1]], "b.json is not a report"),
        ([document((1, 2)), {"levels": [{"x": 1}]}], "b has a level without a concurrency or rate"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: list[Any], said: str
) -> None:
    files = written(tmp_path, a=contents[0], b=contents[1])
    assert comparison.run(files) == 1
    assert said in capsys.readouterr().err


def test_runs_with_other_levels_are_no_repetitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = written(tmp_path, a=document((1, 2)), b=document((1, 2), concurrency=8))
    assert comparison.run([f"{one},{other}", one]) == 1
    assert "these runs have different levels of load" in capsys.readouterr().err


def test_one_report_is_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert comparison.run(written(tmp_path, a=document((1, 2)))) == 2
    assert "two or more reports are needed" in capsys.readouterr().err
    assert comparison.run([str(tmp_path / "a.json"), "/nowhere.json"]) == 1
    assert "cannot read /nowhere.json" in capsys.readouterr().err


def test_keys_in_headers_are_not_in_reports() -> None:
    arguments = ["m", "--header", "Authorization: Bearer secret", "--header=X-Key: secret", "--rate", "1,2"]
    said = command_line("nerite bench", arguments)
    assert said == "nerite bench m --header 'Authorization: ...' '--header=X-Key: ...' --rate 1,2"


def test_an_origin_survives_its_report() -> None:
    origin = Provenance.now("nerite bench m", "gpu-3:8000", "vllm 1")
    assert Provenance.from_json(json.loads(json.dumps(origin.to_json()))) == origin
    facts = dict(origin.facts())
    assert facts["Server"] == "gpu-3:8000, vllm 1" and "Machine of the client" in facts
    assert "Machine" in dict(Provenance.now("x", "http://localhost:8000").facts())
