"""Reads and checks sampling parameters, under vLLM's names.

Unknown ones are rejected with a suggestion. Those that vLLM knows but no engine here supports are rejected too, unless
their value has no effect.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, cast

from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.text import MAX_NAME, MAX_VALUE
from nerite.llm import structured_output
from nerite.llm.structured_output import Grammar

MAX_SEQUENCES: Final = 128
"""Maximum sequences per prompt. Each takes memory before its first token, and a place in the batch."""
MAX_STOPS: Final = 64
"""Maximum number of stop strings, all of which are searched for after each step."""
MAX_STOP_CHARACTERS: Final = 4096
"""Maximum length of all stop strings together."""
MAX_TOKENS: Final = 1024
"""Maximum length of ``stop_token_ids`` and ``logit_bias``."""
MAX_ALLOWED: Final = 65_536
"""Maximum length of ``allowed_token_ids``."""
MAX_BAD_WORDS: Final = 256
MAX_LOGPROBS: Final = 20
"""Maximum number of alternatives to each token of a prompt."""
LONGEST: Final = MAX_VALUE
"""Maximum size of ``sampling_parameters`` in bytes. The server's event loop parses them, too."""

_Number = TypeVar("_Number", int, float)

_MAX_BIAS: Final = 100
"""A bias of 100 makes a token certain; much larger values overflow in engines."""


class ThinkingBudget(NamedTuple):
    """Bounds what a model thinks before it answers."""

    tokens: int
    begin: str
    """Marker before the thought."""
    end: str
    """Marker after it."""
    begun: bool = False
    """Whether the prompt ends with the first marker."""


@dataclass(frozen=True)
class SamplingParameters:
    """Sampling parameters of a request. The defaults are those of vLLM."""

    n: int = 1
    """Sequences to generate for the prompt."""
    max_tokens: int | None = 16
    """None: as many as fit into the context."""
    min_tokens: int = 0
    """Until then neither the model nor a stop string can end the text."""
    temperature: float = 1.0
    """0: greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    """None: a random seed per request."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives to report beside the chosen token; None: no log probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the value that is added to its logit."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None: all tokens."""
    bad_words: tuple[str, ...] = ()
    """Words that the text must not contain."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last tokens; -1: as many as fit."""
    lora_name: str = ""
    grammar: Grammar | None = None
    """Grammar that the text must match."""
    priority: int = 0
    """Lower values run first. Clients can only lower the urgency of a request."""
    thinking_budget: ThinkingBudget | None = None


_UNSUPPORTED: Final[Mapping[str, Any]] = {
    "best_of": 1,
    "detokenize": True,
    "extra_args": None,
    "logits_processors": None,
    "output_kind": None,
}
"""vLLM's parameters that are not supported here, with the value that has no effect and is accepted."""

_STRUCTURED: Final = ("guided_decoding", "structured_outputs")
"""vLLM's earlier and current name for ``grammar``."""


_OPTIONAL: Final = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
"""Parameters for which null has a meaning."""


def read_json(text: str | bytes) -> dict[str, Any]:
    """Return the members of the value of ``sampling_parameters``, for ``from_mapping``. Raises ``InvalidArgument``."""
    if len(text) > LONGEST:
        raise InvalidArgument(f"'sampling_parameters' has {len(text)} bytes; the maximum is {LONGEST}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"'sampling_parameters' is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("'sampling_parameters' must be a JSON object, such as {\"max_tokens\": 64}")
    return value


def from_mapping(given: Mapping[str, Any]) -> SamplingParameters:
    """Return the sampling parameters in ``given``. Raises ``InvalidArgument`` or ``Unsupported``."""
    read: dict[str, Any] = {}
    for name, value in given.items():
        if name in _READERS:
            if value is not None or name in _OPTIONAL:
                read[name] = _READERS[name](name, value)
        elif name in _STRUCTURED:
            if value is not None:
                if "grammar" in read:
                    raise InvalidArgument(f"{' and '.join(map(repr, _STRUCTURED))} mean the same: remove one of them")
                read["grammar"] = structured_output.read_structured(name, value)
        elif name not in _UNSUPPORTED:
            raise _unknown(name)
        elif value is not None and value != _UNSUPPORTED[name]:
            raise Unsupported(f"the sampling parameter '{name}' is not supported: remove it")
    made = SamplingParameters(**read)
    _check(made)
    return made


def _check(made: SamplingParameters) -> None:
    cut = made.truncate_prompt_tokens
    most = math.inf if made.max_tokens is None else made.max_tokens
    scored = made.prompt_logprobs
    for name, holds, wanted in (
        ("n", 1 <= made.n <= MAX_SEQUENCES, f"1 to {MAX_SEQUENCES}"),
        ("max_tokens", made.max_tokens is None or made.max_tokens >= 0, "0 or more"),
        ("min_tokens", 0 <= made.min_tokens <= most, "0 to max_tokens"),
        ("temperature", made.temperature >= 0, "0 or more"),
        ("top_p", 0 < made.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= made.min_p < 1, "0 or more and below 1"),
        ("presence_penalty", abs(made.presence_penalty) <= 2, "-2 to 2"),
        ("frequency_penalty", abs(made.frequency_penalty) <= 2, "-2 to 2"),
        ("repetition_penalty", made.repetition_penalty > 0, "above 0"),
        ("logprobs", made.logprobs is None or made.logprobs >= 0, "0 or more"),
        ("prompt_logprobs", scored is None or 0 <= scored <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        ("thinking_budget", made.thinking_budget is None or made.n == 1, "for one sequence: 'n' must be 1"),
        ("priority", made.priority >= 0, "0 or more: a request can only be placed behind others"),
        ("seed", made.seed is None or 0 <= made.seed < 2**63, "0 to 2**63 - 1"),
        ("truncate_prompt_tokens", cut is None or cut == -1 or cut > 0, "above 0, or -1 for as many as fit"),
        ("stop", all(made.stop), "non-empty text"),
        ("stop", len(made.stop) <= MAX_STOPS, f"no more than {MAX_STOPS} texts"),
        (
            "stop",
            sum(map(len, made.stop)) <= MAX_STOP_CHARACTERS,
            f"no more than {MAX_STOP_CHARACTERS} characters in total",
        ),
        ("stop_token_ids", all(token >= 0 for token in made.stop_token_ids), "token ids"),
        ("stop_token_ids", len(made.stop_token_ids) <= MAX_TOKENS, f"no more than {MAX_TOKENS} tokens"),
        ("logit_bias", len(made.logit_bias) <= MAX_TOKENS, f"for no more than {MAX_TOKENS} tokens"),
        ("logit_bias", all(abs(bias) <= _MAX_BIAS for _, bias in made.logit_bias), f"-{_MAX_BIAS} to {_MAX_BIAS}"),
        ("allowed_token_ids", made.allowed_token_ids != (), "at least one token, or omitted"),
        ("allowed_token_ids", len(made.allowed_token_ids or ()) <= MAX_ALLOWED, f"no more than {MAX_ALLOWED} tokens"),
        ("bad_words", all(made.bad_words), "non-empty text"),
        ("bad_words", len(made.bad_words) <= MAX_BAD_WORDS, f"no more than {MAX_BAD_WORDS} texts"),
        ("bad_words", all(len(each) <= MAX_NAME for each in made.bad_words), f"of at most {MAX_NAME} characters"),
    ):
        if not holds:
            raise wrong_parameter(name, getattr(made, name), wanted)


def _unknown(name: str) -> NeriteError:
    meant = nearest(name, KNOWN)
    remedy = f"Did you mean {meant}?" if meant else f"There are: {', '.join(sorted(_READERS))}."
    return InvalidArgument(f"'{name}' is not a sampling parameter. {remedy}")


def wrong_parameter(name: str, value: Any, wanted: str) -> InvalidArgument:
    """Return the error for a parameter with a wrong value."""
    return InvalidArgument(f"'{name}' must be {wanted}, got {reprlib.repr(value)}")


def _number(name: str, value: Any, kind: Callable[[Any], _Number], wanted: str) -> _Number:
    """Read a number, which request parameters may hold as text."""
    try:
        if isinstance(value, bool):
            raise ValueError
        number = kind(value)
        if not math.isfinite(number) or (not isinstance(value, str) and number != value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise wrong_parameter(name, value, wanted) from None
    return number


def _integer(name: str, value: Any) -> int:
    number = _number(name, value, int, "an integer")
    if abs(number) >= 2**63:
        raise wrong_parameter(name, value, "a 64-bit integer")
    return number


def _optional(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _float(name: str, value: Any) -> float:
    return _number(name, value, float, "a number")


def _top_k(name: str, value: Any) -> int:
    """Read ``top_k``, for which vLLM accepts both 0 and -1 as "all"."""
    number = _integer(name, value)
    if number < -1:
        raise wrong_parameter(name, value, "a number of tokens, or -1 for all")
    return max(number, 0)


def _seed(name: str, value: Any) -> int | None:
    number = _optional(name, value)
    return None if number == -1 else number


def boolean(name: str, value: Any) -> bool:
    """Read a truth value, which request parameters may hold as text. Raises ``InvalidArgument``."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise wrong_parameter(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_parameter(name, value, "text")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise wrong_parameter(name, value, "text, or a list of texts")
    return tuple(values)


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_parameter(name, value, "a list of numbers")
    return tuple(_integer(name, each) for each in value)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Read an object whose keys are token ids, which JSON writes as text."""
    if not isinstance(value, dict) or not all(token.isdecimal() for token in value):
        raise wrong_parameter(name, value, 'an object such as {"1234": -100}, whose keys are token ids')
    return tuple((_integer(name, token), _float(name, bias)) for token, bias in value.items())


def _budget(name: str, value: Any) -> ThinkingBudget:
    form = 'an object such as {"tokens": 100, "begin": "<think>", "end": "</think>"}'
    try:
        budget = ThinkingBudget(**value)
    except TypeError:
        raise wrong_parameter(name, value, form) from None
    markers = (budget.begin, budget.end)
    if not all(isinstance(each, str) and 0 < len(each) <= MAX_NAME for each in markers):
        raise wrong_parameter(name, value, form)
    if type(budget.tokens) is not int or budget.tokens < 1 or not isinstance(budget.begun, bool):
        raise wrong_parameter(name, value, form)
    return budget


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = cast(
    Mapping[str, Callable[[str, Any], Any]],
    {
        "n": _integer,
        "max_tokens": _optional,
        "min_tokens": _integer,
        "temperature": _float,
        "top_p": _float,
        "top_k": _top_k,
        "min_p": _float,
        "seed": _seed,
        "presence_penalty": _float,
        "frequency_penalty": _float,
        "repetition_penalty": _float,
        "stop": _texts,
        "stop_token_ids": _integers,
        "include_stop_str_in_output": boolean,
        "ignore_eos": boolean,
        "logprobs": _optional,
        "prompt_logprobs": _optional,
        "skip_special_tokens": boolean,
        "spaces_between_special_tokens": boolean,
        "logit_bias": _biases,
        "allowed_token_ids": _integers,
        "bad_words": _texts,
        "truncate_prompt_tokens": _optional,
        "lora_name": _text,
        "priority": _integer,
        "thinking_budget": _budget,
    },
)
"""Reader of each field of ``SamplingParameters``."""
KNOWN: Final = frozenset((*_READERS, *_STRUCTURED, *_UNSUPPORTED))
"""The names that ``from_mapping`` knows."""
