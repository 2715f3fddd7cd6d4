"""Sampling parameters among the parameters of a request, under vLLM's names and TensorRT-LLM's."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.core.errors import NeriteError
from nerite.llm.request_parameters import LOG_PROBS, MAX_PARAMETERS, add_words, read_parameters
from nerite.llm.sampling_parameters import SamplingParameters, from_mapping


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"max_tokens": 4, "bad_words": "", "stop_words": ""}, {"max_tokens": 4}),
        ({"stop_words": "fox"}, {"stop": ["fox"]}),
        ({"stop": "a", "stop_words": "b"}, {"stop": ["a", "b"]}),
        ({"stop_words": "b", "stop": "a"}, {"stop": ["a", "b"]}),
        ({"bad_words": "x"}, {"bad_words": ["x"]}),
        ({"random_seed": 7}, {"seed": 7}),
        ({"min_length": 2}, {"min_tokens": 2}),
        ({"end_id": 50256}, {"stop_token_ids": [50256]}),
        ({"pad_id": 50256, "length_penalty": 1.5, "early_stopping": 1}, {}),
        ({"beam_width": 1, "return_context_logits": False, "return_generation_logits": "false"}, {}),
        ({LOG_PROBS: True}, {LOG_PROBS: True}),
        ({LOG_PROBS: False}, {}),
    ],
)
def test_names_of_tensorrt_llm(said: dict[str, Any], expected: dict[str, Any]) -> None:
    read = read_parameters(said)
    assert read == expected
    read.pop(LOG_PROBS, None)
    from_mapping(read)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"beam_width": 2}, "'beam_width' must be 1, got 2: there is no beam search"),
        ({"return_context_logits": True}, "'return_context_logits' must be false, got True"),
        ({"pad_id": "x"}, "'pad_id' must be a number, got 'x'"),
        ({LOG_PROBS: "maybe"}, "'return_log_probs' must be true or false"),
        ({"random_seed": 1, "seed": 2}, "'random_seed' and 'seed' mean the same: remove one of them"),
        ({"end_id": "x"}, "'stop_token_ids' must be an integer"),
        ({"stop": "", "max_tokens": 1}, "'stop' must be non-empty text"),
        ({"stop_words": 3}, "'stop' must be text, or a list of texts"),
        ({"temprature": 1}, "'temprature' is not a sampling parameter. Did you mean temperature?"),
        ({"language": "en"}, "'language' is not a sampling parameter. There are: "),
        (dict.fromkeys(map(str, range(MAX_PARAMETERS + 1)), 1), "the request has 257 parameters; the maximum is 256"),
    ],
)
def test_what_is_refused(said: dict[str, Any], why: str) -> None:
    with pytest.raises(NeriteError) as refused:
        from_mapping(read_parameters(said))
    assert refused.value.message.startswith(why)


def test_what_was_not_written_for_the_model_is_ignored() -> None:
    said = {"max_tokens": 4, "language": "en", "traceparent": "00", "temprature": 1}
    assert from_mapping(read_parameters(said, said)) == SamplingParameters(max_tokens=4)
    assert read_parameters({"id": "r1", "max_tokens": 4}) == {"max_tokens": 4}


def test_words_are_added_to_those_in_the_json() -> None:
    for before, after in ((None, ["x", "y"]), ("a", ["a", "x", "y"]), (["a"], ["a", "x", "y"]), (3, 3)):
        values = {"stop": before}
        add_words(values, "stop_words", ["x", "", "y"])
        assert values == {"stop": after}
