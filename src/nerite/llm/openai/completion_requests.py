"""Parses the bodies of completions, and the fields that completions and chats have in common. Pure.

A body becomes a typed request or an ``ApiError`` for the first mistake in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.tensor import Buffer
from nerite.llm.openai import sampling
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, UnknownField, check_count, missing, wrong_type, wrong_value
from nerite.llm.openai.sampling import Sampling
from nerite.llm.openai.text_model import SPECIAL
from nerite.llm.sampling_parameters import MAX_SEQUENCES

MAX_CHOICES: Final = MAX_SEQUENCES
"""Maximum for all prompts together. Each choice is a request to the model."""
MAX_LOGPROBS: Final = 20
_LEAST_PRIORITY: Final = 2**31 - 1
DEFAULT_TOKENS: Final = sampling.SamplingSetting(16, "max_tokens")
"""OpenAI's default for completions without a limit."""
IGNORED: Final = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""OpenAI fields that do not affect the answer."""
_IDS: Final = ("prompt_cache_key", "safety_identifier", "user")
"""Ignored fields whose values are identifiers and are validated as such."""
_COMPLETION_KNOWN: Final = frozenset(
    (
        *("model", "prompt", "n", "best_of", "echo", "logprobs", "max_tokens", "stream", "stream_options", "suffix"),
        *("priority", "return_token_ids", SPECIAL),
        *sampling.COMMON,
        *IGNORED,
    )
)


class CompletionFields(NamedTuple):
    """Fields that completions and chat completions have in common."""

    model: str
    n: int
    sampling: Sampling
    stream: bool
    usage: bool
    """Whether a stream ends with token counts."""
    logprobs: int
    """Number of likely tokens to report per position; negative: no log probabilities at all."""
    special: bool | None
    """Whether the tokenizer adds special tokens to the prompt; None: the default for this kind of completion."""
    priority: int
    """As in KServe and vLLM: requests with higher numbers may wait longer."""
    user: str = ""
    """The end user, whose requests a route may keep on one arm. Models do not see it."""
    running_usage: bool = False
    """Whether each event of a stream has the token counts so far, as with vLLM."""
    token_ids: bool = False
    """Whether choices have the ids of their tokens and of those of the prompt, as with vLLM."""
    unknown: Sequence[UnknownField] = ()
    """Fields of the body that were passed over."""


class CompletionRequest(NamedTuple):
    """The parsed body of a completion."""

    wanted: CompletionFields
    prompts: Sequence[bytes | memoryview]
    """In UTF-8; token ids in JSON if ``tokens``."""
    echo: bool
    kept: int
    """Number of choices per prompt that are returned: the likeliest ones."""
    suffix: bytes | memoryview = b""
    """Text that follows what is generated."""
    tokens: bool = False
    """Whether the prompts are token ids."""


def read_completion(body: Buffer) -> CompletionRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_COMPLETION_KNOWN)
    model = fields.name("model")
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    best_of = fields.integer("best_of", n, 1, MAX_CHOICES)
    if best_of < n:
        raise wrong_value("best_of", f"at least the {n} choices of 'n'", best_of)
    suffix = fields.text("suffix", "")
    echo = fields.flag("echo")
    if echo and suffix:
        raise ApiError("'echo' cannot be combined with 'suffix'", "suffix", "invalid_parameter")
    count = fields.integer("logprobs", -1, 0, MAX_LOGPROBS) if "logprobs" in fields else -1
    settings = sampling.read(fields, ("max_tokens",), 0)
    prompts, tokens = read_texts(fields, "prompt", MAX_CHOICES)
    if not prompts or b"" in prompts:
        raise ApiError("prompt must be non-empty", "prompt", "invalid_value")
    if tokens and suffix:
        raise ApiError("'suffix' needs a prompt that is text", "suffix", "invalid_parameter")
    if len(prompts) * best_of > MAX_CHOICES:
        name, each = ("n", n) if best_of == n else ("best_of", best_of)
        raise wrong_value(name, f"no more than {MAX_CHOICES} choices for all {len(prompts)} prompts together", each)
    wanted = completion_fields(fields, model, best_of, settings, count)
    if best_of > n and wanted.stream:
        raise ApiError("'best_of' cannot be combined with 'stream'", "best_of", "invalid_parameter")
    return CompletionRequest(wanted, prompts, echo, n, suffix.encode(), tokens)


def completion_fields(
    fields: Fields, model: str, n: int, settings: Sampling, logprobs: int, counted_in: str = "logprobs"
) -> CompletionFields:
    """Return the fields that both kinds have in common. ``counted_in`` is the field with the number of ``logprobs``."""
    ids = {name: fields.name(name, "") for name in _IDS}
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options.values and not stream:
        raise ApiError("`stream_options` can only be used when `stream` is True", "stream_options", "invalid_parameter")
    options.pass_over_unknown(("include_usage", "include_obfuscation", "continuous_usage_stats"))
    if logprobs >= 0:
        settings["logprobs"] = sampling.SamplingSetting(logprobs, counted_in)
    priority = fields.integer("priority", 0, 0, _LEAST_PRIORITY)
    special = fields.flag(SPECIAL) if SPECIAL in fields else None
    usage = options.flag("include_usage")
    running = usage and options.flag("continuous_usage_stats")
    ids_wanted = fields.flag("return_token_ids")
    return CompletionFields(
        *(model, n, settings, stream, usage, logprobs, special, priority, ids["user"]),
        *(running, ids_wanted, fields.unknown),
    )


MAX_TOKEN_ID: Final = 2**31 - 1
_TEXTS: Final = "a string, an array of strings, an array of token ids, or an array of such arrays"


def read_texts(fields: Fields, name: str, most: int) -> tuple[list[bytes], bool]:
    """Return the texts of a field in UTF-8, or their token ids in JSON; and whether they are token ids."""
    if name not in fields:
        raise missing(name)
    given: Any = fields[name]
    texts = given if isinstance(given, list) else [given]
    if texts and all(type(each) is int for each in texts):
        return [token_bytes(name, texts)], True
    check_count(name, texts, most)
    if texts and all(isinstance(each, list) for each in texts):
        return [token_bytes(f"{name}[{place}]", each) for place, each in enumerate(texts)], True
    if not all(isinstance(each, str) for each in texts):
        raise wrong_type(name, _TEXTS, given)
    return [each.encode() for each in texts], False


def token_bytes(param: str, tokens: Sequence[Any]) -> bytes:
    """Return token ids in JSON; nothing for none. Raises ``ApiError``."""
    for token in tokens:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise wrong_value(param, "token ids, which are integers from 0", token)
    return orjson.dumps(tokens) if tokens else b""
