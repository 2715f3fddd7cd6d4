"""``nerite bench`` with loads like those of users: conversations, traces, adapters, texts, cancellations.

What it counts is compared to what the server has counted.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from llm_models import language_model
from lora_adapters import adapter
from nerite.tools.bench.command import run
from reading_models import embedding_model, reranking_model
from serving import IDENTITY, Serving, python_model, serving

SLOW = """
async def execute(self, requests):
    import asyncio
    responses = []
    for request in requests:
        await asyncio.sleep(request.inputs()[0].as_numpy().flat[0])
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]))
    return responses
"""
BRIEF = ("--warm-up", "0.1", "--window", "0.2", "--windows", "3")
OPENAI = ("--protocol", "openai")
TOKENS = "vllm:generation_tokens_total"
PROMPTS = "vllm:prompt_tokens_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("bench_loads")
    models = folder / "models"
    (models / "docent").mkdir(parents=True)
    adapter(language_model(models / "docent" / "1"))
    for name, write in (("vectors", embedding_model), ("rates", reranking_model)):
        (models / name).mkdir()
        write(models / name / "1", positions=4_000)
    python_model(models, "identity", IDENTITY)
    python_model(models, "slow", SLOW)
    with serving(models, folder / "log") as running:
        yield running


def bench(server: Serving, folder: Path, model: str, *more: str, status: int = 0) -> tuple[dict[str, Any], str]:
    """Measure one level; return what the JSON says of it, and what is printed. Without a process for the command."""
    file = folder / "figures.json"
    url = server.grpc if "grpc" in more else server.http
    said, wrong = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(wrong):
        assert run([model, "--url", url, "--json", str(file), *more]) == status, wrong.getvalue()
    if status:
        return {}, wrong.getvalue()
    (level,) = json.loads(file.read_text())["levels"]
    assert level["failed"] == 0, level["failures"]
    return level, said.getvalue()


def counted(server: Serving, name: str, **labels: str) -> float:
    """The sum of the samples of a metric."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for sample, value in server.metrics().items()
        if sample.partition("{")[0] == name and all(each in sample for each in wanted)
    )


def test_the_counts_are_those_of_the_server(server: Serving, tmp_path: Path) -> None:
    before = {name: counted(server, name, model="docent") for name in (TOKENS, PROMPTS)}
    successes = counted(server, "nv_inference_request_success", model="docent")
    level, _ = bench(
        server, tmp_path, "docent", *OPENAI, "--requests", "30", "--concurrency", "4", "--output-length", "uniform:2,9",
        "--processes", "2",
    )  # fmt: skip
    assert level["totals"] == {"answered": 30, "failed": 0, "cancelled": 0, "unfinished": 0}
    assert level["requests"] == level["server"]["requests"] == 30
    assert counted(server, "nv_inference_request_success", model="docent") - successes == 30
    tokens = level["tokens"]
    assert counted(server, TOKENS, model="docent") - before[TOKENS] == pytest.approx(30 * tokens["per_request"])
    assert counted(server, PROMPTS, model="docent") - before[PROMPTS] == pytest.approx(30 * tokens["per_prompt"])
    assert 2 <= tokens["per_request"] <= 9


def test_equal_seeds_give_equal_loads(server: Serving, tmp_path: Path) -> None:
    more = (*OPENAI, "--requests", "12", "--output-length", "uniform:2,9", "--turns", "uniform:1,3")
    found = [
        bench(server, tmp_path, "docent", *more, "--concurrency", count, "--processes", count)[0]
        for count in ("1", "3")
    ]
    assert found[0]["requests"] == found[1]["requests"]
    assert found[0]["tokens"]["per_request"] == pytest.approx(found[1]["tokens"]["per_request"])


def test_conversations(server: Serving, tmp_path: Path) -> None:
    more = ("--turns", "3", "--think-time", "0.05", "--output-length", "4", "--input-length", "20")
    alone, _ = bench(server, tmp_path, "docent", *OPENAI, "--requests", "6", "--concurrency", "6", *more[4:])
    level, said = bench(server, tmp_path, "docent", *OPENAI, "--requests", "6", "--concurrency", "6", *more)
    assert level["totals"]["answered"] == level["requests"] == 18
    assert level["seconds"] > 2 * 0.05
    # The later turns have the former ones in front of them.
    assert level["tokens"]["per_prompt"] > 2 * alone["tokens"]["per_prompt"]
    assert "prompts had" in said


def test_conversations_that_arrive_at_a_rate(server: Serving, tmp_path: Path) -> None:
    more = ("--turns", "2", "--output-length", "2", "--rate", "20", "--burstiness", "0.5", "--ramp", "0.2")
    level, said = bench(server, tmp_path, "docent", *OPENAI, *BRIEF[:3], "0.5", *BRIEF[4:], *more)
    assert level["arrivals"] == "gamma" and level["burstiness"] == 0.5
    assert level["requests_per_second"] > 20
    assert level["totals"]["answered"] >= level["requests"]
    assert "did not keep up" not in said


def test_lengths_are_in_tokens(server: Serving, tmp_path: Path) -> None:
    def prompts(*more: str) -> float:
        level, _ = bench(server, tmp_path, "docent", *OPENAI, "--requests", "3", "--output-length", "1", *more)
        return float(level["tokens"]["per_prompt"])

    # The chat template adds some to each.
    short, long = (prompts("--input-length", length) for length in ("20", "320"))
    assert long - short == pytest.approx(300, rel=0.1)
    with_system = prompts("--input-length", "20", "--system-length", "200", "--system-share", "0.5")
    assert with_system - short == pytest.approx(210, rel=0.1)


def test_a_trace_is_sent_at_its_times(server: Serving, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entries = [{"timestamp": at * 100, "input_length": 30 + at, "output_length": at + 1} for at in range(10)]
    trace.write_text("\n".join(map(json.dumps, entries)))
    level, _ = bench(server, tmp_path, "docent", *OPENAI, "--replay", str(trace), "--speed", "2")
    assert level["arrivals"] == "replay" and level["requests"] == 10
    assert 0.45 <= level["seconds"] < 10
    assert level["tokens"]["per_request"] == pytest.approx(sum(range(1, 11)) / 10)
    assert level["rate"] == pytest.approx(10 / 0.45)


def test_a_trace_of_the_server_is_sent_again(server: Serving, tmp_path: Path) -> None:
    records = [
        record
        for identity, at in enumerate((0, 50, 60, 200), 1)
        for record in (
            {"id": identity, "model_name": "identity", "model_version": 1},
            {"id": identity, "timestamps": [{"name": "REQUEST_START", "ns": 10**15 + at * 10**6}]},
        )
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(records))
    level, _ = bench(server, tmp_path, "identity", "--replay", str(file))
    assert level["requests"] == 4 and level["seconds"] >= 0.2
    assert "replay it with --protocol openai" in _refused_lengths(server, tmp_path)


def _refused_lengths(server: Serving, folder: Path) -> str:
    file = folder / "lengths.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 5}')
    return bench(server, folder, "identity", "--replay", str(file), status=1)[1]


def test_adapters_in_a_mix(server: Serving, tmp_path: Path) -> None:
    mix = ("--adapter", "docent:1", "--adapter", "poet:3", "--requests", "40", "--output-length", "1")
    level, said = bench(server, tmp_path, "docent", *OPENAI, *mix, "--concurrency", "4")
    models = level["models"]
    assert models["docent"]["requests"] + models["poet"]["requests"] == 40
    assert models["poet"]["requests"] > models["docent"]["requests"] > 0
    assert models["poet"]["time_to_first_ms"]["p50"] > 0
    assert " poet: " in said
    _, said = bench(server, tmp_path, "docent", *OPENAI, "--adapter", "pote:1", status=1)
    assert "the server does not answer as 'pote': " in said and "Did you mean 'poet'?" in said


@pytest.mark.parametrize(
    "model, endpoint, more",
    [
        ("vectors", "embeddings", ("--input-length", "normal:60,10")),
        ("rates", "rerank", ("--input-length", "60", "--query-length", "12")),
        ("rates", "score", ()),
    ],
)
def test_texts(server: Serving, tmp_path: Path, model: str, endpoint: str, more: tuple[str, ...]) -> None:
    wanted = ("--endpoint", endpoint, "--texts", "5", "--requests", "8", "--concurrency", "2")
    level, said = bench(server, tmp_path, model, *OPENAI, *wanted, *more)
    assert level["requests"] == 8
    assert level["texts_per_second"] == pytest.approx(5 * level["requests_per_second"])
    assert "tokens" not in level and "Texts/s" in said


def test_completions(server: Serving, tmp_path: Path) -> None:
    more = ("--endpoint", "completions", "--requests", "4", "--output-length", "3")
    level, _ = bench(server, tmp_path, "docent", *OPENAI, *more)
    assert level["tokens"]["per_request"] == 3


def test_the_server_notices_cancelled_streams(server: Serving, tmp_path: Path) -> None:
    more = ("--cancel-rate", "100", "--cancel-after", "uniform:0.05,0.1", "--requests", "12", "--concurrency", "4")
    _, said = bench(server, tmp_path, "docent", *OPENAI, *more, "--output-length", "90000", status=1)
    assert "no request was answered" in said
    before = counted(server, "nerite_requests_given_up_total", model="docent")
    # Half of the requests are cancelled; the others are so short that they are answered before.
    trace = tmp_path / "trace.jsonl"
    entries = [{"timestamp": at, "input_length": 9, "output_length": 1 if at % 2 else 90_000} for at in range(12)]
    trace.write_text("\n".join(map(json.dumps, entries)))
    level, said = bench(
        server, tmp_path, "docent", *OPENAI, "--replay", str(trace), "--cancel-rate", "100", "--cancel-after", "2"
    )
    assert level["totals"] == {"answered": 6, "failed": 0, "cancelled": 6, "unfinished": 0}
    assert level["server_cancelled"] == level["cancelled"] == 6
    assert counted(server, "nerite_requests_given_up_total", model="docent") - before == 6
    assert "The server noticed all of them." in said and "| Cancelled |" in said


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_to_models_are_cancelled(server: Serving, tmp_path: Path, protocol: str) -> None:
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"data": [{"INPUT0": [0.2]}]}))
    metrics = f"127.0.0.1:{server.ports['Metrics']}"
    more = ("--data", str(data), "--requests", "12", "--concurrency", "4", "--metrics-url", metrics)
    level, _ = bench(
        server, tmp_path, "slow", "--protocol", protocol, *more, "--cancel-rate", "50", "--cancel-after", "0.05"
    )
    totals = level["totals"]
    assert totals["answered"] + totals["cancelled"] == 12 and 0 < totals["cancelled"] < 12
    assert level["server_cancelled"] == totals["cancelled"]


def test_a_server_whose_metrics_are_unknown(server: Serving, tmp_path: Path) -> None:
    more = (
        "--protocol",
        "grpc",
        "--shape",
        "INPUT0:1",
        "--requests",
        "30",
        "--cancel-rate",
        "50",
        "--cancel-after",
        "0",
    )
    level, said = bench(server, tmp_path, "identity", *more)
    assert "server_cancelled" not in level
    assert "--metrics-url names its metrics" in said


def test_two_runs_are_compared(server: Serving, tmp_path: Path) -> None:
    for name in ("before", "after"):
        bench(server, tmp_path, "identity", *BRIEF, "--concurrency", "2")
        (tmp_path / "figures.json").rename(tmp_path / f"{name}.json")
    page = tmp_path / "page.html"
    said = io.StringIO()
    with redirect_stdout(said):
        files = [str(tmp_path / f"{name}.json") for name in ("before", "after")]
        assert run(["compare", *files, "--html", str(page)]) == 0
    assert "| concurrency 2 | requests/s |" in said.getvalue()
    assert f"Server: http://{server.http}" in said.getvalue() and "nerite bench identity" in said.getvalue()
    assert "<h1>identity: before and after</h1>" in page.read_text()


def test_a_report_tells_where_it_comes_from(server: Serving, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    bench(server, tmp_path, "identity", "--requests", "50", "--html", str(page), "--header", "X-Key: secret")
    origin = json.loads((tmp_path / "figures.json").read_text())["provenance"]
    assert origin["machine"]["cores"] > 0 and origin["version"].startswith("nerite ")
    assert origin["server"]["version"]
    assert "secret" not in json.dumps(origin) + page.read_text()
    assert "measured as a whole" in page.read_text() and origin["command"].startswith("nerite bench identity")
