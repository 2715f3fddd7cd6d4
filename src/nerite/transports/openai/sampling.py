"""How text is sampled: OpenAI's fields to the names that engines have for them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

from nerite.backends.llm.sampling import (
    LONGEST,
    MOST_ALLOWED,
    MOST_BAD_WORDS,
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    MOST_TOKENS,
)
from nerite.transports.openai.errors import ApiError
from nerite.transports.openai.fields import (
    Fields,
    check_count,
    check_length,
    encoded,
    missing,
    wrong_type,
    wrong_value,
)

_LARGEST_LIMIT: Final = 2**31 - 1
_LONGEST_TOKEN_ID: Final = 10
_RANGES: Final = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
EXTENSIONS: Final = (
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "length_penalty",
    "lora_name",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "top_k",
    "truncate_prompt_tokens",
)
"""What OpenAI does not have and engines do: given to the model as it is, which knows what is right."""
_MOST: Final = {
    "allowed_token_ids": MOST_ALLOWED,
    "bad_words": MOST_BAD_WORDS,
    "stop_token_ids": MOST_TOKENS,
}
"""Elements of those that are arrays."""
COMMON: Final = (*_RANGES, "seed", "stop", "logit_bias", "response_format", *EXTENSIONS)
"""The fields that ``read`` looks at, besides the numbers of tokens."""


class Setting(NamedTuple):
    """A value for the engine."""

    value: Any
    param: str
    """The field that it comes from."""


Sampling = dict[str, Setting]
"""Settings by the engine's names."""


def read(fields: Fields, limits: tuple[str, ...]) -> Sampling:
    """Return the settings of a body. ``limits`` are the names of the most tokens, the first that is there counts."""
    sampling: Sampling = {}
    for name in limits:
        if name in fields:
            sampling["max_tokens"] = Setting(fields.integer(name, 0, 1, _LARGEST_LIMIT), name)
            break
    for name, (low, high) in _RANGES.items():
        if name in fields:
            sampling[name] = Setting(fields.number(name, low, high), name)
    if "seed" in fields:
        sampling["seed"] = Setting(fields.integer("seed", 0, -(2**63), 2**63 - 1), "seed")
    if stop := _stop(fields):
        sampling["stop"] = Setting(stop, "stop")
    if bias := _bias(fields):
        sampling["logit_bias"] = Setting(bias, "logit_bias")
    if guide := _guide(fields):
        sampling["guided_decoding"] = guided(guide, "response_format")
    for name in EXTENSIONS:
        if name in fields:
            value = fields[name]
            if isinstance(value, list) and name in _MOST:
                check_count(name, value, _MOST[name])
            sampling[name] = Setting(value, name)
    return sampling


def guided(guide: dict[str, Any], param: str) -> Setting:
    """Return what makes an engine's output fit, as Triton's vLLM backend takes it: JSON in a string."""
    return Setting(encoded(param, guide).decode(), param)


def written(sampling: Sampling) -> bytes:
    """Return settings as JSON. Raises ``ApiError`` for more than an engine reads."""
    try:
        text = orjson.dumps({name: setting.value for name, setting in sampling.items()})
    except orjson.JSONEncodeError:
        deep = next(setting for setting in sampling.values() if isinstance(setting.value, dict | list))
        raise wrong_value(deep.param, "JSON that is nested less deeply", deep.value) from None
    if len(text) > LONGEST:
        largest = max(sampling.values(), key=lambda setting: len(repr(setting.value)))
        raise ApiError(
            f"Invalid '{largest.param}': what the body says of sampling has {len(text)} bytes as JSON, and may have "
            f"{LONGEST}.",
            largest.param,
            "string_above_max_length",
        )
    return text


def for_choice(sampling: Sampling, index: int) -> Sampling:
    """Return the settings of one of several choices: with one seed for all of them they would be the same text."""
    seed = sampling.get("seed")
    if seed is None or index == 0:
        return sampling
    return {**sampling, "seed": seed._replace(value=seed.value + index)}


def _stop(fields: Fields) -> list[str]:
    if "stop" not in fields:
        return []
    value = fields["stop"]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise wrong_type("stop", "a string or an array of strings", value)
    if "" in texts:
        raise wrong_value("stop", "no empty string", value)
    check_count("stop", texts, MOST_STOPS)
    for text in texts:
        check_length("stop", text)
    if (size := sum(map(len, texts))) > MOST_STOP_CHARACTERS:
        raise wrong_value("stop", f"no more than {MOST_STOP_CHARACTERS} characters in all of them", size)
    return texts


def _bias(fields: Fields) -> dict[str, float]:
    given = fields.object("logit_bias")
    check_count("logit_bias", given.values, MOST_TOKENS)
    for token in given.values:
        if not token.isdecimal() or len(token) > _LONGEST_TOKEN_ID:
            raise wrong_value("logit_bias", "an object whose keys are the ids of tokens", token)
    return {token: given.number(token, -100, 100) for token in given.values}


def _guide(fields: Fields) -> dict[str, Any]:
    """Return what a response format demands of the text; nothing of any text."""
    form = fields.object("response_format")
    if not form.values:
        return {}
    kind = form.text("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise wrong_value("response_format.type", "one of 'text', 'json_object', 'json_schema'", kind)
    schema = form.object("json_schema").object("schema").values
    if not schema:
        raise missing("response_format.json_schema.schema")
    return {"json": schema}


def not_offered(param: str, why: str) -> ApiError:
    """Return the refusal of what is OpenAI's, and not to be had here."""
    return ApiError(f"Unsupported parameter: '{param}': {why}", param, "unsupported_parameter")
