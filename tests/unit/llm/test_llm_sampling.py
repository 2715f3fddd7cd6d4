"""Sampling parameters: vLLM's names and defaults, and a refusal by name for everything else."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.llm import sampling_parameters
from nerite.llm.sampling_parameters import SamplingParameters


def test_nothing_said_is_vllms_defaults() -> None:
    assert sampling_parameters.from_mapping(sampling_parameters.read_json("{}")) == SamplingParameters()
    assert (SamplingParameters().max_tokens, SamplingParameters().temperature) == (16, 1.0)


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ({"max_tokens": None}, "max_tokens", None),
        ({"max_tokens": 3.0}, "max_tokens", 3),
        ({"max_tokens": "12"}, "max_tokens", 12),
        ({"temperature": "0.5"}, "temperature", 0.5),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({"seed": -1}, "seed", None),
        ({"stop": "."}, "stop", (".",)),
        ({"stop": [".", "!"]}, "stop", (".", "!")),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": [7]}, "stop_token_ids", (7,)),
        ({"ignore_eos": "True"}, "ignore_eos", True),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logit_bias": {"3": 1, "4": -100}}, "logit_bias", ((3, 1.0), (4, -100.0))),
        ({"logit_bias": None}, "logit_bias", ()),
        ({"allowed_token_ids": [7, 8]}, "allowed_token_ids", (7, 8)),
        ({"allowed_token_ids": None}, "allowed_token_ids", None),
        ({"bad_words": ["x"]}, "bad_words", ("x",)),
    ],
)
def test_what_is_read(said: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(sampling_parameters.from_mapping(said), field) == value


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"n": 0}, "'n' must be 1 to 128, got 0"),
        ({"n": True}, "'n' must be an integer, got True"),
        ({"n": 1.5}, "'n' must be an integer, got 1.5"),
        ({"n": 2**64}, "'n' must be a 64-bit integer"),
        ({"max_tokens": -1}, "'max_tokens' must be 0 or more"),
        ({"prompt_logprobs": 21}, "'prompt_logprobs' must be 0 to 20"),
        ({"max_tokens": 4, "min_tokens": 5}, "'min_tokens' must be 0 to max_tokens, got 5"),
        ({"temperature": -1}, "'temperature' must be 0 or more"),
        ({"temperature": float("nan")}, "'temperature' must be a number, got nan"),
        ({"temperature": float("inf")}, "'temperature' must be a number, got inf"),
        ({"top_p": 0}, "'top_p' must be above 0"),
        ({"top_k": -2}, "'top_k' must be a number of tokens, or -1 for all"),
        ({"min_p": 1}, "'min_p' must be 0 or more"),
        ({"presence_penalty": 3}, "'presence_penalty' must be -2 to 2"),
        ({"repetition_penalty": 0}, "'repetition_penalty' must be above 0"),
        ({"seed": 2**63}, "'seed' must be a 64-bit integer"),
        ({"stop": [""]}, "'stop' must be non-empty text"),
        ({"stop": [3]}, "'stop' must be text, or a list of texts"),
        ({"stop_token_ids": 3}, "'stop_token_ids' must be a list of numbers"),
        ({"ignore_eos": 1}, "'ignore_eos' must be true or false"),
        ({"logprobs": -1}, "'logprobs' must be 0 or more"),
        ({"truncate_prompt_tokens": 0}, "'truncate_prompt_tokens' must be above 0, or -1 for as many as fit"),
        ({"logit_bias": {"3": 1e30}}, "'logit_bias' must be -100 to 100, got ((3, 1e+30),)"),
        ({"logit_bias": {"a": 1}}, "'logit_bias' must be an object such as"),
        ({"logit_bias": {"3": "nan"}}, "'logit_bias' must be a number, got 'nan'"),
        ({"logit_bias": [3]}, "'logit_bias' must be an object such as"),
        ({"allowed_token_ids": []}, "'allowed_token_ids' must be at least one token, or omitted"),
        ({"bad_words": [""]}, "'bad_words' must be non-empty text"),
        ({"n": 10**6}, "'n' must be 1 to 128, got 1000000"),
        ({"stop": ["a"] * 65}, "'stop' must be no more than 64 texts, got ('a', "),
        ({"stop": ["a" * 2000] * 3}, "'stop' must be no more than 4096 characters in total, got ('aaa"),
        ({"stop_token_ids": [3] * 1025}, "'stop_token_ids' must be no more than 1024 tokens, got (3, "),
        (
            {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
            "'logit_bias' must be for no more than 1024 tokens",
        ),
        ({"allowed_token_ids": [3] * 65_537}, "'allowed_token_ids' must be no more than 65536 tokens, got (3, "),
        ({"bad_words": ["a"] * 257}, "'bad_words' must be no more than 256 texts, got ('a', "),
        ({"bad_words": ["a" * 1025]}, "'bad_words' must be of at most 1024 characters, got ('aaa"),
        ({"max_token": 4}, "'max_token' is not a sampling parameter. Did you mean max_tokens?"),
        ({"zebra": 4}, "'zebra' is not a sampling parameter. There are: allowed_token_ids, "),
    ],
)
def test_what_is_wrong(said: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        sampling_parameters.from_mapping(said)
    assert refused.value.message.startswith(text)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"logits_processors": ["x"]}, "the sampling parameter 'logits_processors' is not supported"),
        ({"best_of": 2}, "the sampling parameter 'best_of' is not supported"),
    ],
)
def test_what_is_lacking(said: dict[str, Any], text: str) -> None:
    with pytest.raises(Unsupported) as refused:
        sampling_parameters.from_mapping(said)
    assert refused.value.message.startswith(text)


@pytest.mark.parametrize("said", [{"prompt_logprobs": None}, {"bad_words": []}, {"detokenize": True}, {"best_of": 1}])
def test_what_is_lacking_and_asks_for_nothing(said: dict[str, Any]) -> None:
    assert sampling_parameters.from_mapping(said) == SamplingParameters()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", b"\xff"])
def test_what_is_no_json_object(text: str | bytes) -> None:
    with pytest.raises(NeriteError, match="'sampling_parameters'"):
        sampling_parameters.read_json(text)
