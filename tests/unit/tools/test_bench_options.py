"""The command line of ``nerite bench``: combinations without effect are refused, each with its reason or remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nerite.client import ClientError
from nerite.tools.bench.measurement import LoadLevel
from nerite.tools.bench.options import cancel_plan, levels_of, parse, prompt_load, trace_of
from nerite.tools.bench.planning import Distribution
from nerite.tools.bench.replay import TracedRequest

OPENAI = ("--protocol", "openai")
EMBEDDINGS = (*OPENAI, "--endpoint", "embeddings")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--turns", "3"), "--turns does not apply to --protocol http: use --protocol openai"),
        (("--endpoint", "rerank"), "--endpoint does not apply to --protocol http: use --protocol openai"),
        ((*OPENAI, "--batch", "4"), "--batch does not apply to --protocol openai: use --protocol http or grpc"),
        ((*OPENAI, "--streaming"), "--streaming does not apply to --protocol openai"),
        ((*OPENAI, "--sequence-length", "4"), "--sequence-length does not apply"),
        ((*OPENAI, "--data", "zero"), "its only data are prompts"),
        ((*EMBEDDINGS, "--turns", "3"), "--turns does not apply to --endpoint embeddings, only to chat"),
        ((*EMBEDDINGS, "--adapter", "a:1"), "only to chat or completions"),
        ((*EMBEDDINGS, "--query-length", "3"), "only to rerank or score"),
        ((*EMBEDDINGS, "--slo", "ttft:5"), "its only objective is --slo latency:MS"),
        ((*OPENAI, "--texts", "3"), "only to embeddings or rerank or score"),
        ((*OPENAI, "--endpoint", "rerank", "--data", "file"), "only to chat or completions or embeddings"),
        ((*OPENAI, "--think-time", "3"), "--think-time requires --turns: there is nothing to think about"),
        ((*OPENAI, "--system-share", "0.5"), "--system-share requires --system-length"),
        (("--cancel-after", "3"), "--cancel-after requires --cancel-rate"),
        (("--metrics-url", "here:8002"), "--metrics-url requires --cancel-rate"),
        (("--speed", "3"), "--speed requires --replay"),
        (("--poisson",), "--poisson requires --rate"),
        (("--burstiness", "2"), "--burstiness requires --rate"),
        (("--rate", "2", "--poisson", "--burstiness", "2"), "--poisson is --burstiness 1: leave out --burstiness"),
        ((*OPENAI, "--input-length", "3", "--prompt-words", "3"), "leave out --prompt-words"),
        ((*OPENAI, "--input-length", "3", "--data", "file"), "leave out --data"),
        ((*OPENAI, "--turns", "3", "--data", "file"), "leave out --turns"),
        (("--cancel-rate", "5", "--sequence-length", "3"), "would leave sequences open on the server"),
        (("--replay", "file", "--rate", "3"), "not allowed with"),
        (("--replay", "file", "--requests", "3"), "--replay determines the load: leave out --requests"),
        (("--replay", "file", "--windows", "3"), "--replay is measured as a whole"),
        ((*OPENAI, "--replay", "file", "--turns", "3"), "sends single requests at the recorded times"),
        (("--requests", "3", "--warm-up", "3"), "--requests is measured as a whole"),
        (("--requests", "3", "--rate", "3,9", "--within", "p99:2"), "leave out --within"),
        (("--requests", "3", "--sequence-length", "3"), "would leave sequences open on the server"),
        (("--cancel-rate", "101"), "not a number from 0 to 100"),
        ((*OPENAI, "--adapter", "poet"), "is not a name with a weight: write poet:3"),
        ((*OPENAI, "--adapter", "poet:0"), "is not a name with a weight"),
        ((*OPENAI, "--input-length", "normal:3"), "write normal:MEAN,DEVIATION"),
        ((*OPENAI, "--input-length", "file:/nowhere"), "No such file or directory"),
    ],
)
def test_what_has_no_effect_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_request:
        parse(["m", *arguments])
    assert exit_request.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, levels",
    [
        (("--concurrency", "2,3"), [LoadLevel(2), LoadLevel(3)]),
        (("--rate", "5"), [LoadLevel(rate=5)]),
        (("--rate", "5", "--poisson"), [LoadLevel(rate=5, arrivals="poisson")]),
        (("--rate", "5", "--burstiness", "0.5"), [LoadLevel(rate=5, arrivals="gamma", burstiness=0.5)]),
    ],
)
def test_levels(arguments: tuple[str, ...], levels: list[LoadLevel]) -> None:
    assert levels_of(parse(["m", *arguments]), ()) == levels


def test_a_trace_has_a_level_of_its_own() -> None:
    options = parse(["m", "--replay", "file", "--speed", "2"])
    trace = [TracedRequest(10.0), TracedRequest(11.0), TracedRequest(14.0)]
    assert levels_of(options, trace) == [LoadLevel(rate=1.5, arrivals="replay")]


def test_what_is_asked_for_is_planned() -> None:
    options = parse(
        [
            "m", *OPENAI, "--input-length", "normal:9,1", "--output-length", "7", "--turns", "2", "--think-time", "3",
            "--system-length", "5", "--system-share", "0.5", "--adapter", "a:1", "--adapter", "b:3", "--seed", "4",
            "--cancel-rate", "10", "--parameter", "temperature=0",
        ]
    )  # fmt: skip
    wanted = prompt_load(options, ())
    workload = wanted.workload
    assert (workload.inputs.kind, workload.outputs, workload.turns) == (
        "normal",
        Distribution.parse("7"),
        Distribution.parse("2"),
    )
    assert (workload.models, workload.seed, workload.shared_system) == ({"a": 1.0, "b": 3.0}, 4, 0.5)
    assert cancel_plan(options) == workload.cancel is not None and workload.cancel is not None
    assert workload.cancel.part == pytest.approx(0.1) and workload.cancel.after == Distribution.parse("0.5")
    assert not wanted.in_words and wanted.system_tokens == 5 and wanted.settings == {"temperature": 0}
    plain = prompt_load(parse(["m", *OPENAI]), ())
    assert plain.in_words and plain.words == 100 and plain.workload.models == {"m": 1.0}
    assert prompt_load(parse(["m", *OPENAI, "--endpoint", "score"]), ()).workload.query == Distribution.parse("16")


@pytest.mark.parametrize(
    "entry, arguments, said",
    [
        ({"input_length": 5}, (), "has lengths of prompts in tokens: replay it with --protocol openai"),
        ({"input_length": 5}, (*OPENAI, "--input-length", "5"), "leave out --input-length"),
        ({"input_length": 5}, (*OPENAI, "--prompt-words", "5"), "leave out --prompt-words"),
        ({"text_input": "x"}, (*OPENAI, "--data", "file"), "leave out --data"),
        ({"input_length": 5, "output_length": 5}, (*OPENAI, "--output-length", "5"), "leave out --output-length"),
        ({"input_length": 5, "output_length": 5}, EMBEDDINGS, "replay it with --endpoint chat or completions"),
        ({"input_length": 5}, (*OPENAI, "--endpoint", "score"), "has single prompts"),
    ],
)
def test_a_trace_that_does_not_fit(tmp_path: Path, entry: Any, arguments: tuple[str, ...], said: str) -> None:
    file = tmp_path / "trace"
    file.write_text(json.dumps({"timestamp": 0, **entry}))
    with pytest.raises(ClientError, match=said):
        trace_of(parse(["m", "--replay", str(file), *arguments]))
