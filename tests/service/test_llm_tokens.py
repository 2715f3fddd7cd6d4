"""Tokens under /v1, on an engine: counted, told, sent instead of text, with the log probabilities of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from llm_models import TEMPLATE, language_model
from lora_adapters import adapter
from serving import Serving, serving

TEXT = "The quick brown fox, café."
GAP = {"added_tokens_decoder": {str(n): {"content": f"<|fim_{name}|>"} for n, name in enumerate(("prefix", "suffix"))}}


EXACT = """
backend: "llm"
parameters [
  { key: "KV_CACHE_PRECISION" value { string_value: "f32" } },
  { key: "INFERENCE_PRECISION_HINT" value { string_value: "f32" } }
]
"""


def write_model(models: Path, name: str) -> Path:
    (models / name).mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(EXACT)
    version = language_model(models / name / "1")
    (version / "chat_template.jinja").write_text(TEMPLATE)
    return version


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tokens")
    version = write_model(folder / "models", "chat")
    (version / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 5, "min_p": 7}')
    (version / "tokenizer_config.json").write_text(json.dumps(GAP))
    thinker = write_model(folder / "models", "thinker")
    (thinker / "chat_template.jinja").write_text(TEMPLATE + "<think>")
    adapter(thinker)
    with serving(folder / "models", folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as made:
        yield made


def ask(server: Serving, path: str, **body: Any) -> Any:
    status, _, answer = server.ask("POST", path, {"model": "chat", **body})
    assert status == 200, answer
    return json.loads(answer)


def tokens_of(server: Serving, text: str = TEXT) -> list[int]:
    tokens: list[int] = ask(server, "/tokenize", prompt=text)["tokens"]
    return tokens


def test_tokens_and_back(server: Serving) -> None:
    told = ask(server, "/tokenize", prompt=TEXT)
    assert told["count"] == len(told["tokens"]) == len(TEXT.encode())
    assert ask(server, "/detokenize", tokens=told["tokens"]) == {"prompt": TEXT}
    large = ask(server, "/tokenize", prompt="ab" * 40_000)
    assert large["count"] == 80_000 and ask(server, "/detokenize", tokens=large["tokens"])["prompt"] == "ab" * 40_000
    messages = [{"role": "user", "content": "Hello"}]
    chat = ask(server, "/tokenize", messages=messages)
    assert "[user]Hello" in ask(server, "/detokenize", tokens=chat["tokens"])["prompt"]


def test_counting(server: Serving) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    counted = ask(server, "/v1/messages/count_tokens", messages=messages)
    assert counted == {"input_tokens": ask(server, "/tokenize", messages=messages)["count"]}
    before = server.json("GET", "/v2/models/chat/stats")["model_stats"][0]["inference_count"]
    ask(server, "/v1/messages/count_tokens", messages=messages)
    assert server.json("GET", "/v2/models/chat/stats")["model_stats"][0]["inference_count"] == before + 1


def test_prompts_of_tokens(server: Serving, client: openai.OpenAI) -> None:
    ids = tokens_of(server)
    settings: Any = {"model": "chat", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    said = client.completions.create(prompt=TEXT, **settings)
    same = client.completions.create(prompt=[ids, ids], **settings)
    assert [choice.text for choice in same.choices] == [said.choices[0].text] * 2
    assert same.usage is not None and same.usage.prompt_tokens == 2 * len(ids)
    with pytest.raises(openai.BadRequestError, match="999, but the vocabulary has 258 tokens") as refused:
        client.completions.create(prompt=[999], **settings)
    assert refused.value.param == "prompt"


def test_ids_of_what_is_generated(server: Serving) -> None:
    asked = {"prompt": TEXT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (choice,) = ask(server, "/v1/completions", **asked)["choices"]
    assert choice["prompt_token_ids"] == tokens_of(server) and len(choice["token_ids"]) == 4
    _, _, text = server.ask("POST", "/v1/completions", {"model": "chat", "stream": True, **asked})
    lines = [line.removeprefix("data: ") for line in text.decode().split("\n\n") if line]
    events = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [token for event in events for token in event.get("token_ids", ())] == choice["token_ids"]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [tokens_of(server)]


def test_log_probabilities_of_a_prompt(server: Serving, client: openai.OpenAI) -> None:
    settings: Any = {"model": "chat", "temperature": 0, "logprobs": 1, "extra_body": {"ignore_eos": True}}
    ids = tokens_of(server)
    asked = {"prompt": ids, "max_tokens": 200, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    (said,) = ask(server, "/v1/completions", **asked, logprobs=1)["choices"]
    whole = client.completions.create(prompt=[ids + said["token_ids"]], max_tokens=0, echo=True, **settings)
    likely = whole.choices[0].logprobs
    assert likely is not None and likely.token_logprobs is not None and likely.top_logprobs is not None
    assert likely.token_logprobs[0] is None and likely.top_logprobs[0] is None
    assert len(likely.tokens or ()) == len(ids) + 200 and (likely.text_offset or [])[:3] == [0, 1, 2]
    # What the pipeline computed token by token, the scorer computes at once.
    assert likely.token_logprobs[len(ids) :] == pytest.approx(said["logprobs"]["token_logprobs"], abs=1e-3)
    pairs = zip(likely.top_logprobs[1:], likely.token_logprobs[1:], strict=True)
    greedy = [max(top.values()) == each for top, each in pairs]
    assert sum(greedy[len(ids) - 1 :]) > 190, "greedy decoding chooses the likeliest"
    assert not all(greedy[: len(ids) - 1]), "a text is not what the model would say"
    (choice,) = client.completions.create(prompt=TEXT, max_tokens=1, echo=True, **settings).choices
    assert choice.text.startswith(TEXT) and choice.logprobs is not None
    assert len(choice.logprobs.tokens or ()) == len(ids) + 1


def test_the_best_of_several(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="chat", prompt=TEXT, n=1, best_of=4, seed=1, temperature=2, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in done.choices] == [0] and done.choices[0].logprobs is None
    assert done.usage is not None and done.usage.completion_tokens == 32


def test_defaults_of_the_checkpoint(server: Serving, client: openai.OpenAI) -> None:
    settings: Any = {"model": "chat", "prompt": TEXT, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    texts = {client.completions.create(**settings).choices[0].text for _ in range(3)}
    assert len(texts) == 1, "generation_config.json says temperature 0"
    assert len({client.completions.create(**settings, temperature=2).choices[0].text for _ in range(3)}) > 1
    log = server.log.read_text()
    assert "have the defaults of generation_config.json: temperature=0.0, top_k=5" in log
    assert "its generation_config.json is not used for 'min_p': 'min_p' must be 0 or more and below 1, got 7" in log


def test_a_gap_in_a_text(server: Serving) -> None:
    asked = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (choice,) = ask(server, "/v1/completions", prompt="def f(", suffix="): pass", **asked)["choices"]
    prompt = ask(server, "/detokenize", tokens=choice["prompt_token_ids"])["prompt"]
    assert prompt == "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"


def test_running_counts(server: Serving) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "chat", "prompt": TEXT, "max_tokens": 4, "stream": True, "stream_options": options}
    _, _, text = server.ask("POST", "/v1/completions", {**body, "temperature": 0, "ignore_eos": True})
    lines = [line.removeprefix("data: ") for line in text.decode().split("\n\n") if line]
    events = [json.loads(line) for line in lines[:-1]]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 4


def test_a_continued_message(server: Serving) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
    told = ask(server, "/tokenize", messages=messages, continue_final_message=True)
    assert ask(server, "/detokenize", tokens=told["tokens"])["prompt"].endswith("[assistant]I am")


def test_choices(client: openai.OpenAI) -> None:
    done = client.completions.create(model="chat", prompt=TEXT, extra_body={"guided_choice": ["yes", "no"]})
    assert done.choices[0].text in ("yes", "no")


def test_forms_end(client: openai.OpenAI) -> None:
    """A model that knows no JSON neither pads it with blanks nor goes on with digits until its limit."""
    properties = {"count": {"type": "integer"}, "share": {"type": "number"}, "known": {"type": "boolean"}}
    form = {"type": "object", "properties": properties, "required": list(properties)}
    for seed in range(7):
        asked: Any = {"model": "chat", "prompt": TEXT, "max_tokens": 200, "temperature": 2, "seed": seed}
        (choice,) = client.completions.create(**asked, extra_body={"guided_json": form}).choices
        assert choice.finish_reason == "stop", choice.text
        assert json.loads(choice.text).keys() == properties.keys()


def test_a_thought_that_is_too_long(server: Serving) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "thinking_token_budget": 8}
    answer = ask(server, "/v1/chat/completions", **body, model="thinker")
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"], "the model never ends a thought by itself"
    assert answer["usage"]["completion_tokens"] == 40
    without = ask(server, "/v1/chat/completions", **{**body, "thinking_token_budget": None}, model="thinker")
    assert not without["choices"][0]["message"]["content"]


def test_adapters_are_models(client: openai.OpenAI) -> None:
    entries = {model.id: model.model_dump() for model in client.models.list()}
    assert entries["poet"]["parent"] == "thinker" and "parent" not in entries["thinker"]
    settings: Any = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    said = client.completions.create(model="poet", **settings)
    same = client.completions.create(model="thinker", **settings)
    assert (said.model, said.choices[0].text) == ("poet", same.choices[0].text)
