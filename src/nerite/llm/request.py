"""Parses requests to language models: prompt, sampling parameters, images, and which outputs they want."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.tensor import BYTES, Buffer, TensorSpec, decode_bytes
from nerite.llm.images import read_images
from nerite.llm.request_parameters import LOG_PROBS, WORDS, add_words, read_parameters
from nerite.llm.sampling_parameters import SamplingParameters, from_mapping, read_json, wrong_parameter

TOKENS: Final = "prompt_token_ids"
"""Input with a prompt that is token ids."""
LOG_PROB_OUTPUTS: Final = frozenset(("cum_log_probs", "output_log_probs"))
"""Outputs that ``return_log_probs`` asks for, as TensorRT-LLM names them."""


@dataclass(frozen=True)
class LlmCall:
    """A parsed request for text."""

    prompt: str | Sequence[int]
    """Text or token ids."""
    sampling: SamplingParameters
    stream: bool
    """Whether to respond after each step instead of once at the end."""
    prepend: str
    """Text before the generated text: the prompt or nothing."""
    extras: frozenset[str]
    """Requested outputs other than the text."""
    special_tokens: bool = True
    """Whether the tokenizer adds special tokens to the prompt."""
    images: tuple[bytes, ...] = ()
    """Image files, in the order in which the prompt refers to them."""
    echo: bool = False
    """Whether the text begins with the prompt, also if that is token ids."""


def read_call(request: InferenceRequest) -> LlmCall:
    """Parse ``request``. Raises ``NeriteError``."""
    given = dict(zip((spec.name for spec in request.header.inputs), request.buffers, strict=True))
    if "embedding_request" in given:
        raise Unsupported("the model computes no embeddings: omit the input 'embedding_request'")
    prompt: str | Sequence[int] = _call_text(given, "text_input")
    if TOKENS in given:
        if prompt:
            raise InvalidArgument(f"a prompt is text or token ids: leave 'text_input' or '{TOKENS}' empty")
        prompt = read_tokens(_call_text(given, TOKENS))
    stream = _flag(given, "stream")
    excluded = _flag(given, "exclude_input_in_output", default=stream)
    if stream and not excluded:
        raise InvalidArgument("When streaming, `exclude_input_in_output` = False is not allowed.")
    extras = {name.removeprefix("return_") for name in given if name.startswith("return_") and _flag(given, name)}
    wanted = _sampling(request, given, extras)
    special = _flag(given, "add_special_tokens", default=True)
    images = tuple(read_images(request))
    if images and not isinstance(prompt, str):
        raise InvalidArgument(f"images need their prompt as text: omit '{TOKENS}'")
    prepend = prompt if isinstance(prompt, str) and not excluded else ""
    return LlmCall(prompt, wanted, stream, prepend, frozenset(extras), special, images, not excluded)


def _sampling(request: InferenceRequest, given: Mapping[str, Buffer], extras: set[str]) -> SamplingParameters:
    """Read the sampling parameters; add the outputs that one of TensorRT-LLM's asks for. Raises ``NeriteError``."""
    header = request.header
    if "sampling_parameters" in given:
        values = read_json(_call_text(given, "sampling_parameters"))
    else:
        values = read_parameters(header.parameters, header.forwarded)
        if values.pop(LOG_PROBS, False):
            extras |= LOG_PROB_OUTPUTS
            values.setdefault("logprobs", 0)
    for spec in header.inputs:
        if spec.name in WORDS:
            add_words(values, spec.name, _texts(given, spec))
    wanted = from_mapping(values)
    if wanted.n > 1 and extras & LOG_PROB_OUTPUTS:
        raise InvalidArgument(f"'{LOG_PROBS}' is for one sequence: 'n' must be 1, got {wanted.n}")
    return wanted


def read_tokens(text: str) -> Sequence[int]:
    """Read token ids, which are JSON in a string. Raises ``InvalidArgument``."""
    try:
        tokens = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"'{TOKENS}' is not valid JSON: {error}") from None
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise wrong_parameter(TOKENS, tokens, "a list of token ids, such as [1, 5, 7]")
    return tokens


def _call_text(given: Mapping[str, Buffer], name: str) -> str:
    (text,) = _texts(given, TensorSpec(name, BYTES, (1,)))
    return text


def _texts(given: Mapping[str, Buffer], spec: TensorSpec) -> list[str]:
    try:
        return [bytes(element).decode() for element in decode_bytes(given[spec.name], spec.elements)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{spec.name}' is not valid UTF-8: {error}") from None


def _flag(given: Mapping[str, Buffer], name: str, *, default: bool = False) -> bool:
    return bool(memoryview(given[name]).tobytes()[0]) if name in given else default
