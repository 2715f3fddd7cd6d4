"""A repository of Triton's vLLM backend, as it is, behind a server."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CONTEXT, adapter, language_checkpoint
from llm_models import TEMPLATE, chat_tokens
from process_family import command_of, processes_of
from serving import Serving, eventually
from vllm_serving import WHERE_VLLM_IS, vllm_serving

CONFIG = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
FEW = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
ENDLESS = {**FEW, "max_tokens": CONTEXT}

pytestmark = WHERE_VLLM_IS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    place = tmp_path_factory.mktemp("vllm")
    checkpoint = language_checkpoint(place / "checkpoint", begin=True)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    version = place / "models" / "chat" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    arguments = {
        "model": str(checkpoint), "disable_log_requests": True, "enforce_eager": True, "max_model_len": CONTEXT,
        "kv_cache_memory_bytes": 1 << 28, "enable_lora": True, "max_loras": 2, "max_num_seqs": 8,
    }  # fmt: skip
    (version / "model.json").write_text(json.dumps(arguments))
    adapters = {name: str(adapter(place / name, seed)) for seed, name in enumerate("AB")}
    (version / "multi_lora.json").write_text(json.dumps(adapters))
    with vllm_serving(place / "models", place / "log") as running:
        yield running


def generate(server: Serving, **said: Any) -> tuple[int, Any]:
    status, _, body = server.ask("POST", "/v2/models/chat/generate", {"text_input": "once", **said})
    return status, json.loads(body)


def text(server: Serving, prompt: str = "once", **more: Any) -> str:
    said = json.dumps({**FEW, **more})
    status, answer = generate(server, text_input=prompt, sampling_parameters=said, exclude_input_in_output=True)
    assert status == 200, answer
    return str(answer["text_output"])


def events(server: Serving, **said: Any) -> Iterator[Any]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    body = json.dumps({"text_input": "once", "stream": True, **said})
    connection.request("POST", "/v2/models/chat/generate_stream", body)
    answer = connection.getresponse()
    try:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        answer.close()
        connection.close()


def test_the_choice_is_logged_with_its_reason(server: Serving) -> None:
    assert "'chat': the engine is vllm: the configuration names it" in server.text
    config = server.json("GET", "/v2/models/chat/config")
    assert (config["backend"], config["max_batch_size"]) == ("vllm", 0)
    assert config["model_transaction_policy"]["decoupled"]


@pytest.mark.feature("vllm", "continuous batching")
def test_eight_run_at_once(server: Serving) -> None:
    streams = [events(server, parameters={**ENDLESS, "temperature": 1, "seed": seed}) for seed in range(8)]
    # None of them would end: that each answers says that all of them run.
    for _ in range(3):
        for stream in streams:
            assert "text_output" in next(stream)
    for stream in streams:
        stream.close()


@pytest.mark.feature("vllm", "priorities")
def test_a_request_that_may_wait_longer(server: Serving) -> None:
    streams = [events(server, parameters=ENDLESS) for _ in range(8)]
    for stream in streams:
        next(stream)
    ended: list[str] = []

    def ask(name: str, **said: Any) -> None:
        assert generate(server, parameters={**FEW, **said})[0] == 200
        ended.append(name)

    with ThreadPoolExecutor() as pool:
        asked = []
        for count, (name, said) in enumerate({"low": {"priority": 5, "max_tokens": 64}, "usual": {}}.items(), 1):
            asked.append(pool.submit(ask, name, **said))
            eventually(
                lambda count=count: server.metrics()['nerite_admission_waiting{model="chat"}'] == count  # type: ignore[misc]
            )
        streams.pop().close()
        for each in asked:
            each.result()
    for stream in streams:
        stream.close()
    assert ended == ["usual", "low"]


def test_generate_and_a_stream_say_the_same(server: Serving) -> None:
    status, whole = generate(server, parameters=FEW)
    assert (status, whole["text_output"][:4]) == (200, "once")
    flags = {f"return_{what}": True for what in ("finish_reason", "num_input_tokens", "num_output_tokens")}
    streamed = list(events(server, parameters=FEW, **flags))
    assert len(streamed) > 3
    assert "once" + "".join(event["text_output"] for event in streamed) == whole["text_output"]
    assert sum(event["num_output_tokens"] for event in streamed) == FEW["max_tokens"]
    assert [event["finish_reason"] for event in streamed][-2:] == ["None", "length"]
    assert {event["num_input_tokens"] for event in streamed} == {5}


@pytest.mark.feature("vllm", "probability of the chosen token")
@pytest.mark.feature("vllm", "probabilities of others")
def test_probabilities_of_alternatives(server: Serving) -> None:
    _, answer = generate(server, sampling_parameters=json.dumps({**FEW, "logprobs": 2}), return_logprobs=True)
    told = json.loads(answer["logprobs"])
    assert len(told) == FEW["max_tokens"]
    for token in told:
        assert len(token) == 2
        assert {each["rank"] for each in token.values()} == {1, 2}


def test_under_openais_api(server: Serving) -> None:
    asked = {"model": "chat", "prompt": "once", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    status, _, body = server.ask("POST", "/v1/completions", {**asked, "ignore_eos": True})
    answer = json.loads(body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 8
    assert {len(each) for each in answer["choices"][0]["logprobs"]["top_logprobs"]} <= {1, 2}
    chat = [{"role": "user", "content": "once"}]
    tokens = chat_tokens(chat)
    told = server.json("POST", "/v1/chat/completions", {"model": "chat", "messages": chat, **FEW})
    assert told["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.feature("vllm", "stop strings and tokens")
@pytest.mark.feature("vllm", "fewest and most tokens (`min_tokens`, `max_tokens`)")
def test_what_ends_a_sequence(server: Serving) -> None:
    _, answer = generate(server, sampling_parameters=json.dumps({**FEW, "logprobs": 0}), return_logprobs=True)
    (third,) = json.loads(answer["logprobs"])[2]
    said = json.dumps({**FEW, "stop_token_ids": [int(third)]})
    _, stopped = generate(server, sampling_parameters=said, return_finish_reason=True, return_num_output_tokens=True)
    assert (stopped["finish_reason"], stopped["num_output_tokens"] <= 3) == ("stop", True)
    said = json.dumps({**FEW, "stop_token_ids": [int(third)], "min_tokens": 8})
    assert generate(server, sampling_parameters=said, return_num_output_tokens=True)[1]["num_output_tokens"] == 8
    whole = text(server)
    letter = next(character for character in whole if character.isascii() and character.isprintable())
    assert text(server, stop=[letter]) == whole.partition(letter)[0]


@pytest.mark.feature("vllm", "penalties")
def test_penalties(server: Serving) -> None:
    plain = text(server, max_tokens=64)
    other = text(server, max_tokens=64, frequency_penalty=2, presence_penalty=2, repetition_penalty=2)
    assert len(set(other)) > len(set(plain))


@pytest.mark.feature("vllm", "prompts cut to length (`truncate_prompt_tokens`)")
def test_a_prompt_is_cut(server: Serving) -> None:
    said = json.dumps({**FEW, "truncate_prompt_tokens": 2})
    _, answer = generate(server, text_input="x" * CONTEXT, sampling_parameters=said, return_num_input_tokens=True)
    assert answer["num_input_tokens"] == 2


@pytest.mark.feature("vllm", "tokens that are wanted or not (`logit_bias`, `bad_words`, `allowed_token_ids`)")
def test_tokens_that_are_wanted_or_not(server: Serving) -> None:
    letters = {letter: ord(letter) - ord("!") + 2 for letter in "aeiou"}
    assert text(server, logit_bias={str(letters["e"]): 100}) == "e" * FEW["max_tokens"]
    assert set(text(server, allowed_token_ids=list(letters.values()), temperature=2, seed=1)) <= set(letters)
    allowed = {"allowed_token_ids": list(letters.values())}
    likeliest = text(server, **allowed, max_tokens=1)
    assert text(server, **allowed, max_tokens=1, bad_words=[likeliest]) != likeliest


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.mark.feature("vllm", "JSON schema")
@pytest.mark.feature("vllm", "regex")
@pytest.mark.feature("vllm", "choice")
@pytest.mark.feature("vllm", "grammar")
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json": SCHEMA}, r'\{\s*"colour"\s*:\s*"(red|green)"\s*\}'),
    ],
)
def test_structured_output(server: Serving, form: dict[str, Any], pattern: str) -> None:
    # At temperature 0 some processors write white space for ever, where that is allowed.
    said = json.dumps({"max_tokens": 200, "temperature": 1, "guided_decoding": form})
    status, answer = generate(server, sampling_parameters=said, exclude_input_in_output=True, add_special_tokens=False)
    assert status == 200, answer
    assert re.fullmatch(pattern, answer["text_output"])


@pytest.mark.feature("vllm", "several sequences of a prompt (`n`)")
@pytest.mark.feature("vllm", "seeds")
def test_several_sequences_and_seeds(server: Serving) -> None:
    said = json.dumps({**FEW, "temperature": 1.5, "n": 3, "seed": 5})
    _, one = generate(server, sampling_parameters=said)
    _, other = generate(server, sampling_parameters=said)
    assert len(set(one["text_output"])) > 1
    assert one["text_output"] == other["text_output"]


@pytest.mark.feature("vllm", "LoRA by request")
def test_adapters_by_request_also_in_one_batch(server: Serving) -> None:
    """Without a spare slot, requests that want none get another's answers: vLLM's kernels for processors do that."""
    wanted = [None, "A", "B"]

    def answer(lora: str | None, prompt: str) -> str:
        return text(server, prompt, **({"lora_name": lora} if lora else {}))

    prompts = [f"once upon {number}" for number in range(4)]
    asked = [(lora, prompt) for prompt in prompts for lora in wanted]
    alone = [answer(*each) for each in asked]
    assert len(set(alone)) > len(prompts)
    with ThreadPoolExecutor(len(asked)) as callers:
        together = list(callers.map(lambda each: answer(*each), asked))
    # The first tokens: later ones of random weights may differ by rounding, which depends on the batch.
    assert [each[:2] for each in together] == [each[:2] for each in alone]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"sampling_parameters": '{"lora_name": "C"}'}, "LoRA C is not supported, we currently support ['A', 'B']"),
        ({"sampling_parameters": '{"logprobs": 500}'}, "'logprobs' is 500"),
        ({"text_input": "x" * (CONTEXT - 1)}, f"the prompt has {CONTEXT} tokens, but the model's context is {CONTEXT}"),
        ({"text_input": "", "add_special_tokens": False}, "the prompt is empty"),
        ({"sampling_parameters": '{"logit_bias": {"5": 1e30}}'}, "'logit_bias' must be -100 to 100"),
        ({"sampling_parameters": '{"logit_bias": {"99999": 1}}'}, "vllm error in starting a request"),
        ({"stream": True, "exclude_input_in_output": False}, "When streaming, `exclude_input_in_output` = False"),
        ({"sampling_parameters": '{"stop_token_ids": [9999999]}'}, "vllm error in starting a request"),
        (
            {"sampling_parameters": '{"guided_decoding": {"json": {"type": "nothing"}}}'},
            "vllm error in starting a request",
        ),
    ],
)
def test_what_is_refused(server: Serving, said: dict[str, Any], error: str) -> None:
    status, answer = generate(server, **said)
    assert (status, answer["error"].startswith("Error generating stream: ")) == (400, True), answer
    assert error in answer["error"]
    assert text(server)


@pytest.mark.feature("vllm", "cancellation")
def test_a_connection_that_is_cut_gives_everything_back(server: Serving) -> None:
    streams = [events(server, parameters={**ENDLESS, "seed": seed}) for seed in range(4)]
    for stream in streams:
        assert "text_output" in next(stream)
    for stream in streams:
        stream.close()
    used = 'nerite_llm_kv_blocks{model="chat",state="used",version="1"}'
    running = 'vllm:num_requests_running{model="chat",version="1"}'
    eventually(lambda: (server.metrics()[used], server.metrics()[running]) == (0, 0))


@pytest.mark.feature("vllm", "beginnings that prompts share are computed once (prefix caching)")
@pytest.mark.feature("vllm", "hits of the prefix cache are counted")
def test_what_was_computed_before(server: Serving) -> None:
    def told(name: str) -> float:
        return server.metrics()[f'vllm:prefix_cache_{name}_total{{model="chat",version="1"}}']

    beginning = "a beginning that is shared " * 40
    first = text(server, beginning + "one")
    queries, hits = told("queries"), told("hits")
    assert text(server, beginning + "one") == first
    text(server, beginning + "two")
    assert told("queries") - queries > 2 * len(beginning)
    assert told("hits") - hits > len(beginning)


def test_an_engine_that_dies_takes_its_processes_along_and_comes_back(server: Serving) -> None:
    worker = worker_of(server)
    core = next(pid for pid in processes_of(worker) if "EngineCore" in command(pid))
    stream = events(server, parameters=ENDLESS)
    assert "text_output" in next(stream)
    os.kill(core, signal.SIGKILL)
    failed = [event["error"] for event in stream if "error" in event]
    assert len(failed) == 1
    eventually(lambda: not Path(f"/proc/{worker}").exists())
    eventually(lambda: server.ready("chat"), 500)
    assert text(server)
    worker = worker_of(server)
    children = processes_of(worker)
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def worker_of(server: Serving) -> int:
    return next(pid for pid in processes_of(server.process.pid) if "nerite.workers.child.worker" in command(pid))


def command(pid: int) -> str:
    return " ".join(command_of(pid))
