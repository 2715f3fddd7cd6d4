"""Reads sampling parameters from the parameters of a request, under vLLM's names and those of TensorRT-LLM's clients.

Some of TensorRT-LLM's parameters mean nothing to other engines. They are accepted with values that change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.llm.sampling_parameters import KNOWN, boolean, wrong_parameter

MAX_PARAMETERS: Final = 256
"""Maximum number of request parameters, if sampling parameters are passed among them."""
LOG_PROBS: Final = "return_log_probs"
"""TensorRT-LLM's parameter for the outputs ``cum_log_probs`` and ``output_log_probs``."""
WORDS: Final[Mapping[str, str]] = {"stop_words": "stop", "bad_words": "bad_words"}
"""Sampling parameters by TensorRT-LLM's names. They are inputs, too, because a parameter cannot be a list."""
_NAMES: Final[Mapping[str, str]] = {"random_seed": "seed", "min_length": "min_tokens", "end_id": "stop_token_ids"}
"""Other sampling parameters by TensorRT-LLM's names."""
_ALWAYS: Final[Mapping[str, tuple[object, str]]] = {
    "beam_width": (1, "there is no beam search"),
    "return_context_logits": (False, "logits are not returned"),
    "return_generation_logits": (False, "logits are not returned"),
    "return_perf_metrics": (False, "they are in the statistics of the model"),
}
"""The only value that a parameter may have, and why."""
_ID: Final = "id"
"""The id of a request to ``generate``, which Triton passes on among its parameters, too."""
_IDLE: Final = ("pad_id", "length_penalty", "early_stopping")
"""Numbers that change nothing for sequences that are neither padded nor the result of beam search."""


def read_parameters(parameters: Mapping[str, Any], forwarded: Collection[str] = ()) -> dict[str, Any]:
    """Return the sampling parameters among ``parameters``, and ``LOG_PROBS`` if it is true. Raises ``NeriteError``.

    Unknown ones are kept, so that they are refused later, but for the ``forwarded`` ones: those are not for the model.
    """
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidArgument(f"the request has {len(parameters)} parameters; the maximum is {MAX_PARAMETERS}")
    read: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in _ALWAYS:
            wanted, why = _ALWAYS[name]
            if str(value).lower() != str(wanted).lower():
                raise Unsupported(f"'{name}' must be {str(wanted).lower()}, got {value!r}: {why}")
        elif name in _IDLE:
            if isinstance(value, str | bool):
                raise wrong_parameter(name, value, "a number")
        elif name == LOG_PROBS:
            if boolean(name, value):
                read[name] = True
        elif name in WORDS:
            add_words(read, name, [value])
        elif name in _NAMES:
            if _NAMES[name] in parameters:
                raise InvalidArgument(f"'{name}' and '{_NAMES[name]}' mean the same: remove one of them")
            read[_NAMES[name]] = [value] if name == "end_id" else value
        elif name in KNOWN or (name not in forwarded and name != _ID):
            read[name] = add_to(value, read[name]) if name in read else value
    return read


def add_words(read: dict[str, Any], name: str, words: Sequence[Any]) -> None:
    """Add stop words or bad words to sampling parameters; an empty text stands for none."""
    if given := [word for word in words if word != ""]:
        read[WORDS[name]] = add_to(read.get(WORDS[name]), given)


def add_to(before: Any, words: Sequence[Any]) -> Any:
    """Return a text, a list of texts or None with ``words`` behind it; anything else stays, and is refused later."""
    if before is None or isinstance(before, str | list):
        return [*([before] if isinstance(before, str) else before or ()), *words]
    return before
