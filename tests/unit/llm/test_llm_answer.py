"""From deltas to responses: what is gathered while a caller has enough, and how it ends."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from doubles import Caller, request
from nerite.core.errors import Cancelled, Internal
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import to_array
from nerite.llm.backend import OUTPUTS
from nerite.llm.engine import FinishReason, TokenDelta, TokenLogprob
from nerite.llm.request import LOG_PROB_OUTPUTS, LlmCall
from nerite.llm.sampling_parameters import SamplingParameters
from nerite.llm.streaming import ResponseHeaders, StreamedAnswer

EXTRAS = frozenset(port.name for port in OUTPUTS[1:]) - LOG_PROB_OUTPUTS


class Bench:
    """An answer, and what its caller gets."""

    def __init__(
        self,
        *,
        stream: bool = True,
        n: int = 1,
        logprobs: int | None = None,
        prepend: str = "",
        wanted: frozenset[str] = frozenset(),
        extras: frozenset[str] = EXTRAS,
    ) -> None:
        self.caller = Caller()
        self.request = request(sink=self.caller)
        self.request.header.wanted = wanted
        call = LlmCall("prompt", SamplingParameters(n=n, logprobs=logprobs), stream, prepend, extras)
        self.answer = StreamedAnswer(self.request, call, ResponseHeaders("m", "1", [port.name for port in OUTPUTS]))
        self.answer.admitted(4)

    def comes(self, text: str, reason: FinishReason | None = None, index: int = 0, **more: Any) -> None:
        self.answer.advanced([TokenDelta(index, [7] * len(text), text, finish_reason=reason, **more)])

    @property
    def texts(self) -> list[Any]:
        return [outputs(response)["text_output"] for response in self.caller.of(self.request)]


def outputs(response: InferenceResponse) -> dict[str, Any]:
    assert response.header is not None
    return {
        spec.name: to_array(spec, data).tolist()
        for spec, data in zip(response.header.outputs, response.data, strict=True)
    }


def test_log_probabilities_under_the_names_of_tensorrt_llm() -> None:
    bench = Bench(logprobs=0, extras=LOG_PROB_OUTPUTS)
    bench.comes("ab", logprobs=[TokenLogprob(7, -1.0, "a", 1), TokenLogprob(7, -0.5, "b", 1)])
    bench.comes("c", FinishReason.STOP, logprobs=[TokenLogprob(7, -2.0, "c", 3)])
    first, last = (outputs(answer[1]) for answer in bench.caller.answers)
    assert first == {"text_output": [b"ab"], "cum_log_probs": [-1.5], "output_log_probs": [-1.0, -0.5]}
    assert last == {"text_output": [b"c"], "cum_log_probs": [-3.5], "output_log_probs": [-2.0]}


def test_a_stream() -> None:
    bench = Bench()
    bench.comes("ab")
    bench.comes("c", FinishReason.STOP)
    first, last = bench.caller.answers
    assert (first[2], last[2]) == (False, True)
    assert outputs(first[1]) == {
        "text_output": [b"ab"],
        "finish_reason": [b"None"],
        "cumulative_logprob": [pytest.approx(np.nan, nan_ok=True)],
        "logprobs": [b"null"],
        "num_input_tokens": [4],
        "num_output_tokens": [2],
        "num_cached_tokens": [-1],
        "token_ids": [b"[7, 7]"],
        "prompt_token_ids": [b"null"],
        "prompt_logprobs": [b"null"],
    }
    assert (outputs(last[1])["finish_reason"], outputs(last[1])["num_output_tokens"]) == ([b"stop"], [1])
    # Equal ones are encoded once.
    assert first[1].header is last[1].header


def test_one_response_for_all() -> None:
    bench = Bench(stream=False, n=2, logprobs=0, prepend="p:")
    bench.comes("a", logprobs=[TokenLogprob(7, -1.5, "a")])
    bench.comes("b", FinishReason.LENGTH, logprobs=[TokenLogprob(8, -0.5, "b")])
    assert not bench.caller.answers
    bench.comes("c", FinishReason.STOP, index=1, logprobs=[TokenLogprob(9, -1.0, "c")])
    ((_, response, final),) = bench.caller.answers
    told = outputs(response)
    assert final
    assert told["text_output"] == [b"p:ab", b"p:c"]
    assert told["finish_reason"] == [b"length", b"stop"]
    assert told["cumulative_logprob"] == [-2.0, -1.0]
    assert json.loads(told["logprobs"][1]) == [{"9": {"logprob": -1.0, "rank": None, "decoded_token": "c"}}]


def test_a_caller_that_has_enough_gets_the_rest_at_once() -> None:
    bench = Bench()
    bench.comes("a")
    bench.answer.paused(bench.request, True)
    bench.comes("b")
    bench.comes("c")
    assert bench.texts == [[b"a"]]
    bench.answer.paused(bench.request, False)
    assert bench.texts == [[b"a"], [b"bc"]]
    bench.answer.paused(bench.request, True)
    bench.comes("d", FinishReason.STOP)
    bench.answer.paused(bench.request, False)
    assert bench.texts == [[b"a"], [b"bc"], [b"d"]]
    assert [final for _, _, final in bench.caller.answers] == [False, False, True]


def test_the_news_may_come_while_a_response_is_sent() -> None:
    bench = Bench()

    def enough(asked: InferenceRequest) -> None:
        for paused in (True, False):
            bench.answer.paused(asked, paused)

    bench.caller.answered = enough
    bench.comes("a")
    bench.comes("b", FinishReason.STOP)
    assert bench.texts == [[b"a"], [b"b"]]


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_cancelled(stream: bool) -> None:
    bench = Bench(stream=stream, n=2)
    bench.comes("a", FinishReason.STOP)
    bench.comes("", FinishReason.ABORT, index=1)
    _, response, final = bench.caller.answers[-1]
    assert (str(response.error), type(response.error), final) == ("Request was cancelled", Cancelled, True)


def test_what_failed() -> None:
    bench = Bench()
    bench.comes("a")
    bench.answer.failed(Internal("why"))
    bench.answer.paused(bench.request, False)
    assert [(str(response.error), final) for _, response, final in bench.caller.answers[1:]] == [("why", True)]


def test_only_what_is_wanted_and_declared() -> None:
    bench = Bench(wanted=frozenset({"finish_reason"}))
    bench.comes("a", FinishReason.STOP)
    assert [outputs(response) for response in bench.caller.of(bench.request)] == [{"finish_reason": [b"stop"]}]
