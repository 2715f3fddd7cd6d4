"""From a request to the order for a pipeline: how long its prompt is, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nerite.backends.llm import images
from nerite.backends.llm.engine import Capabilities, GenerationRequest, kept_of_prompt, tokenizable
from nerite.backends.llm.openvino_genai import framework
from nerite.backends.llm.openvino_genai.options import Options
from nerite.backends.llm.openvino_genai.orders import Order
from nerite.backends.openvino.framework import translated
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.tensor import Array


def ordered(
    request: GenerationRequest,
    numbers: Sequence[int],
    tokenizer: Any,
    options: Options,
    able: Capabilities,
    ends: frozenset[int],
) -> tuple[int, Order]:
    """Return how many tokens a prompt has, without those of its images, and the order. Raises ``NeriteError``."""
    length, prompt = _prompt(request, tokenizer, options, able)
    most = able.context_length
    if not length:
        raise InvalidArgument("the prompt is empty")
    if length >= most:
        raise InvalidArgument(
            f"the prompt has {length} tokens, and the model a context of {most}: leave out at least "
            f"{length - most + 1}, so that there is room for an answer"
        )
    sampling, grammar, room = request.sampling, request.grammar, most - length
    form = None if grammar is None else framework.structured(grammar)
    try:
        framework.generation(options, sampling, 0, room, ends, form)
    except RuntimeError as error:
        raise InvalidArgument(translated(error, "reading sampling parameters").message) from error
    order = Order(numbers, prompt, request.special_tokens, sampling, room, most * options.sees, ends, grammar)
    return length, order


def _prompt(
    request: GenerationRequest, tokenizer: Any, options: Options, able: Capabilities
) -> tuple[int, Array | tuple[str, Sequence[Array]]]:
    prompt = request.prompt
    kept = kept_of_prompt(request.sampling, able.context_length)
    if isinstance(prompt, str):
        text = tokenizable(prompt, kept, able.context_length)
        encoded = tokenizer.encode(text, add_special_tokens=request.special_tokens)
        tokens = np.array(encoded.input_ids.data, np.int64)
    else:
        tokens = np.array([prompt], np.int64)
    length = int(tokens.shape[1])
    cut = request.sampling.truncate_prompt_tokens
    if options.sees:
        if cut is not None or not isinstance(prompt, str):
            what = "tokens" if cut is None else "'truncate_prompt_tokens'"
            raise Unsupported(f"{what}: a model that takes images takes its prompt as text, and the whole of it")
        return length, (prompt, images.pixels(request.images))
    if kept is not None and kept < length:
        length, tokens = kept, np.ascontiguousarray(tokens[:, -kept:])
    return length, tokens
