"""``nerite bench`` measures a real server: what it says is what the server has counted."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import browsing
from serving import IDENTITY, NERITE, PATIENCE, Serving, pbtxt, python_model, serving

REFUSES_EVERY_SECOND = """
def execute(self, requests):
    responses = []
    for request in requests:
        self.seen = getattr(self, "seen", 0) + 1
        error = pb_utils.TritonError("every second") if self.seen % 2 else None
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)], error))
    return responses
"""
COLOURS = ("backgroundColor.match(/\\d+/)[0] * 1", "color.match(/\\d+/)[0] * 1")
BRIEF = ("--warm-up", "0.1", "--window", "0.2", "--windows", "3", "--shape", "INPUT0:16")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("bench")
    python_model(folder / "models", "identity", IDENTITY)
    python_model(folder / "models", "refuses", REFUSES_EVERY_SECOND, pbtxt(batch=0, more=""))
    python_model(folder / "models", "broken", "def initialize(self, args):\n    raise ValueError('no weights')\n")
    with serving(folder / "models", folder / "log", "--exit-on-error=false") as running:
        yield running


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [str(NERITE), "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def measured(server: Serving, folder: Path, model: str, *more: str, grpc: bool = False) -> list[dict[str, Any]]:
    """Return the levels of the JSON, after a look at the rest of what is said."""
    where = ("--protocol", "grpc", "--url", server.grpc) if grpc else ("--url", server.http)
    file = folder / "figures.json"
    bench(model, *where, *BRIEF, "--json", str(file), *more)
    levels: list[dict[str, Any]] = json.loads(file.read_text())["levels"]
    return levels


def counted(server: Serving, model: str) -> int:
    stats = server.json("GET", f"/v2/models/{model}/stats")["model_stats"][0]["inference_stats"]
    return int(stats["success"]["count"])


@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
@pytest.mark.parametrize("shape", ["16", "200000"])
def test_each_answer_is_counted(server: Serving, tmp_path: Path, grpc: bool, shape: str) -> None:
    before = counted(server, "identity")
    shaped = ("--shape", f"INPUT0:{shape}")
    levels = measured(server, tmp_path, "identity", "--concurrency", "1,9", *shaped, grpc=grpc)
    assert [level["concurrency"] for level in levels] == [1, 9]
    for level in levels:
        assert level["failed"] == 0, level["failures"]
        assert level["requests"] == pytest.approx(level["requests_per_second"] * level["seconds"])
        # The server is asked at the ends of the windows, a moment after them.
        assert level["server"]["requests"] >= level["requests"] * 0.8
        assert level["latency_ms"]["min"] <= level["latency_ms"]["p50"] <= level["latency_ms"]["max"]
        assert level["client"]["processor_us_per_request"] > 0
    assert counted(server, "identity") - before >= sum(level["requests"] for level in levels)


@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
def test_an_open_loop_keeps_its_pace(server: Serving, tmp_path: Path, grpc: bool) -> None:
    more = ("--rate", "200,400", "--processes", "2", "--window", "0.5", *(["--poisson"] if grpc else []))
    levels = measured(server, tmp_path, "identity", *more, grpc=grpc)
    for level, rate in zip(levels, (200, 400), strict=True):
        assert level["rate"] == rate
        assert level["arrivals"] == ("poisson" if grpc else "constant")
        # Those under way at the ends do not count; a crowded machine may send in bursts.
        assert level["requests_per_second"] == pytest.approx(rate, rel=0.4)
        assert level["failed"] == 0
        assert level["client"]["sent_late_ms"]["min"] >= 0


def test_the_highest_load_within_a_limit(server: Serving, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    where = ("identity", "--url", server.http, *BRIEF, "--json", str(file), "--concurrency", "1,3", "--within")
    for limit, level, said in (("p99:100000", 3, "at concurrency 3."), ("p50:0", None, "No load was within a p50 of")):
        done = bench(*where, limit)
        assert said in done.stdout
        document = json.loads(file.read_text())
        assert document["within"]["level"] == level
        assert len(document["levels"]) == (1 if level is None else 2)


def test_failures_are_told(server: Serving, tmp_path: Path) -> None:
    for grpc in (False, True):
        (level,) = measured(server, tmp_path, "refuses", grpc=grpc)
        assert level["failed"] == pytest.approx(level["requests"], rel=0.5)
        ((reason, count),) = level["failures"].items()
        assert "every second" in reason
        assert count == level["failed"]


def test_the_table_and_the_csv_say_the_same(server: Serving, tmp_path: Path) -> None:
    file = tmp_path / "figures.csv"
    done = bench("identity", "--url", server.http, *BRIEF, "--concurrency", "2", "--csv", str(file))
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert f"{float(row['requests_per_second']):,.1f}" in done.stdout
    assert f"{float(row['latency_ms.p99']):,.3f}" in done.stdout


def test_the_page_is_whole_and_needs_nothing_else(server: Serving, tmp_path: Path) -> None:
    file = tmp_path / "figures.html"
    bench("identity", "--url", server.http, *BRIEF, "--concurrency", "1:4:*2", "--html", str(file))
    page = file.read_text()
    titles = [
        "Throughput",
        "Latency",
        "Latency by throughput",
        "Distribution of the latency",
        "Where the time goes",
        "Origin",
    ]
    assert re.findall("<h2>(.*?)</h2>", page) == titles
    assert page.count('class="plot"') == 4 and page.count('class="bars"') == 1
    assert page.count("<tr><td>") == 3
    assert not re.search("<(link|img|iframe)|<script[^>]* src|url\\(|@import", page)


@pytest.fixture(scope="module")
def page(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "figures.html"
    bench("identity", "--url", server.http, *BRIEF, "--rate", "20,30,31,32,300", "--html", str(file))
    return file


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_in_a_browser(page: Path, tmp_path: Path, dark: bool) -> None:
    with browsing(tmp_path) as browser:
        browser.size(1180, 2000, dark=dark)
        browser.open(page.as_uri())
        browser.until("document.querySelectorAll('.plot canvas').length === 4")
        browser.picture(tmp_path / "page.png")
        names = "[...document.querySelectorAll('.plot')].map((plot) => plot.querySelectorAll('th').length - 1)"
        assert browser.evaluate(names) == [1, 3, 1, 5]
        ground, text = (browser.evaluate(f"getComputedStyle(document.body).{name}") for name in COLOURS)
        assert (ground < text) == dark
        browser.size(390, 800, dark=dark)
        browser.until("document.documentElement.scrollWidth === 390")
        assert browser.evaluate("document.querySelector('.bars td').getBoundingClientRect().width") > 280
        assert browser.complaints == []
        assert browser.requests == [page.as_uri()]


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        (["identity", "--concurency", "2"], 2, "Did you mean '--concurrency'?"),
        (["identity", "--concurrency", "x"], 2, "write 8, 1,2,4, 1:32:4 or 1:32:*2"),
        (["identity", "--concurrency", "1:1000"], 2, "is more than 100 levels"),
        (["identity", "--rate", "100", "--within", "p99:20"], 2, "write --rate 100,5000"),
        (["identity", "--rate", "1,2", "--within", "p98:20"], 2, "Did you mean 'p99'"),
        (["identity", "--poisson"], 2, "--poisson requires --rate"),
        (["identity", "--rate", "5", "--concurrency", "5"], 2, "not allowed with"),
        (["identity", "--shape", "INPUT0"], 2, "write INPUT:3,224,224"),
        (["identity", "--shape", "INPUT1:16"], 1, "--shape INPUT1:16: there is no input 'INPUT1'"),
        (["identity", "--shape", "INPUT0:2,2"], 1, "shapes are given without the batch dimension"),
        (["identity", "--batch", "9"], 1, "takes batches of at most 8"),
        (["identity", "--data", "/nowhere.json"], 1, "cannot read the data in /nowhere.json"),
        (["identty"], 1, "Did you mean 'identity'?"),
        (["broken"], 1, "Fix the cause, then: nerite client load broken"),
        (["broken"], 1, "no weights"),
        (["identity", "--version", "7"], 1, "Its versions: 1."),
        (["identity", "--url", "127.0.0.1:1"], 1, "Is a server running there?"),
        (["identity", "--url", "127.0.0.1:1", "--protocol", "grpc"], 1, "(its gRPC port)"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    server: Serving, arguments: list[str], status: int, said: str
) -> None:
    where = [] if "--url" in arguments else ["--url", server.http]
    assert said in bench(*arguments, *where, status=status).stderr
