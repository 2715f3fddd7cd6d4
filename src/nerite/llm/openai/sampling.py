"""Translates OpenAI's sampling fields to the engines' parameters, and parameter names in errors back to the fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.errors import InvalidArgument, NeriteError, TooLarge, Unsupported
from nerite.llm.openai.errors import ApiError, status_of
from nerite.llm.openai.fields import Fields, check_count, check_length, encoded, missing, wrong_type, wrong_value
from nerite.llm.sampling_parameters import (
    LONGEST,
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKENS,
)
from nerite.llm.streaming import WRONG

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
"""Fields that engines support beyond OpenAI's, passed on unchanged: the engine validates them."""
_MAX_COUNTS: Final = {
    "allowed_token_ids": MAX_ALLOWED,
    "bad_words": MAX_BAD_WORDS,
    "stop_token_ids": MAX_TOKENS,
}
"""Maximum number of elements of those extensions that are arrays."""
_GUIDES: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's earlier fields of structured output, and what they are called within ``structured_outputs``."""
COMMON: Final = (*_RANGES, "seed", "stop", "logit_bias", "response_format", *_GUIDES, *EXTENSIONS)
"""The fields that ``read`` handles, besides the limits of tokens."""
_GUIDE: Final = "guided_decoding"
_SCHEMA: Final = "response_format.json_schema.schema"
_NAMED: Final = re.compile(r"'(\w+)((?:\.[^']*)?)'")
"""A quoted name, followed by a path within its value."""
_FAULTS: Final = (
    (re.compile(r"^the (?:prompt|text) "), "text_input"),
    (re.compile(r"^a document, "), "documents"),
    (re.compile(r"\((?:max_input_tokens|context_window|kv_blocks) of "), "text_input"),
    (re.compile(r"\(max_output_tokens of "), "max_tokens"),
    (re.compile(r"^structured output "), _GUIDE),
    (re.compile(r"^structured output "), "structured_outputs"),
    (re.compile(r"\bLoRA "), "lora_name"),
)
"""The parameter at fault for error messages that do not name it in quotes."""
_CODES: Final[Mapping[type[NeriteError], str]] = {
    InvalidArgument: "invalid_value",
    Unsupported: "unsupported_parameter",
    TooLarge: "context_length_exceeded",
}
"""OpenAI error codes for errors caused by the request."""


class SamplingSetting(NamedTuple):
    """A parameter value for the engine."""

    value: Any
    param: str
    """The request field that the value comes from."""


Sampling = dict[str, SamplingSetting]
"""Settings by the engine's names."""


def read(fields: Fields, limits: tuple[str, ...], least: int = 1) -> Sampling:
    """Return the settings of a body.

    ``limits`` are the fields for the maximum of tokens, of ``least`` or more; the first one set counts.
    """
    sampling: Sampling = {}
    for name in limits:
        if name in fields:
            sampling["max_tokens"] = SamplingSetting(fields.integer(name, 0, least, _LARGEST_LIMIT), name)
            break
    for name, (low, high) in _RANGES.items():
        if name in fields:
            sampling[name] = SamplingSetting(fields.number(name, low, high), name)
    if "seed" in fields:
        sampling["seed"] = SamplingSetting(fields.integer("seed", 0, -(2**63), 2**63 - 1), "seed")
    if stop := _stop(fields):
        sampling["stop"] = SamplingSetting(stop, "stop")
    if bias := _bias(fields):
        sampling["logit_bias"] = SamplingSetting(bias, "logit_bias")
    guides = {name: {kind: fields[name]} for name, kind in _GUIDES.items() if name in fields}
    if guide := _guide(fields):
        guides["response_format"] = guide
    if len(guides) > 1:
        names = " and ".join(f"'{name}'" for name in guides)
        raise ApiError(f"{names} cannot be combined: an answer has one form", [*guides][-1], "invalid_parameter")
    for name, guide in guides.items():
        sampling[_GUIDE] = guided(guide, name)
    for name in EXTENSIONS:
        if name in fields:
            value = fields[name]
            if isinstance(value, list) and name in _MAX_COUNTS:
                check_count(name, value, _MAX_COUNTS[name])
            sampling[name] = SamplingSetting(value, name)
    return sampling


def is_guided(sampling: Sampling) -> bool:
    """Return whether a grammar constrains the text."""
    return _GUIDE in sampling or "structured_outputs" in sampling


def guided(guide: dict[str, Any], param: str) -> SamplingSetting:
    """Return a structured output setting in the form of Triton's vLLM backend: JSON in a string."""
    return SamplingSetting(encoded(param, guide).decode(), param)


def written(sampling: Sampling) -> bytes:
    """Return settings as JSON. Raises ``ApiError`` if they exceed what an engine reads."""
    try:
        text = orjson.dumps({name: setting.value for name, setting in sampling.items()})
    except orjson.JSONEncodeError:
        deep = next(setting for setting in sampling.values() if isinstance(setting.value, dict | list))
        raise wrong_value(deep.param, "JSON that is nested less deeply", deep.value) from None
    if len(text) > LONGEST:
        largest = max(sampling.values(), key=lambda setting: len(repr(setting.value)))
        raise ApiError(
            f"Invalid '{largest.param}': the sampling settings of the body have {len(text)} bytes as JSON; the "
            f"maximum is {LONGEST}.",
            largest.param,
            "string_above_max_length",
        )
    return text


def for_choice(sampling: Sampling, index: int) -> Sampling:
    """Return the settings of one of several choices, each with its own seed so that their texts differ."""
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
    check_count("stop", texts, MAX_STOPS)
    for text in texts:
        check_length("stop", text)
    if (size := sum(map(len, texts))) > MAX_STOP_CHARACTERS:
        raise wrong_value("stop", f"no more than {MAX_STOP_CHARACTERS} characters in total", size)
    return texts


def _bias(fields: Fields) -> dict[str, float]:
    given = fields.object("logit_bias")
    check_count("logit_bias", given.values, MAX_TOKENS)
    for token in given.values:
        if not token.isdecimal() or len(token) > _LONGEST_TOKEN_ID:
            raise wrong_value("logit_bias", "an object whose keys are token ids", token)
    return {token: given.number(token, -100, 100) for token in given.values}


def _guide(fields: Fields) -> dict[str, Any]:
    """Return the structured output that a response format demands; empty for plain text."""
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
    """Return the error for an OpenAI feature that is not supported here."""
    return ApiError(f"Unsupported parameter: '{param}': {why}", param, "unsupported_parameter")


def fields_of(sampling: Sampling, prompt: str) -> dict[str, str]:
    """Return the request fields by the engine's names for them. ``prompt`` is the field with the text."""
    return {name: setting.param for name, setting in sampling.items()} | dict.fromkeys(
        ("text_input", "prompt_token_ids", "image"), prompt
    )


def in_words_of_client(error: NeriteError, fields: Mapping[str, str]) -> NeriteError:
    """Return an engine's error with the engine's parameter names replaced by the client's ``fields``."""
    if isinstance(error, ApiError):
        return error
    message = error.message.removeprefix(WRONG)
    code = _CODES.get(type(error))
    if code is None:
        return type(error)(message, error.retry_after)
    named = next((name for name, _ in _NAMED.findall(message) if name in fields), "")
    named = named or next((name for pattern, name in _FAULTS if name in fields and pattern.search(message)), "")

    def renamed(match: re.Match[str]) -> str:
        name, path = match.groups()
        return f"'{_client_path(name, path, fields[name])}'" if name in fields else match[0]

    return ApiError(_NAMED.sub(renamed, message), fields.get(named), code if named else None, status_of(error))


def _client_path(name: str, path: str, field: str) -> str:
    """Return the client's path for the engine's ``path`` within parameter ``name``."""
    if name == "image":
        return "image_url"
    if name != _GUIDE:
        return field + path
    if path != ".json" and not path.startswith(".json."):
        return field
    within = {"response_format": _SCHEMA, "tools": ""}.get(field, field)
    return within + path.removeprefix(".json") if within else field
