"""What a completion is asked for. Pure: from the body to what it means, or to the first thing that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nerite.backends.llm.sampling import MOST_SEQUENCES
from nerite.core.tensor import Buffer
from nerite.transports.openai import sampling
from nerite.transports.openai.errors import ApiError
from nerite.transports.openai.fields import Fields, check_count, missing, wrong_type, wrong_value
from nerite.transports.openai.sampling import Sampling, not_offered
from nerite.transports.openai.text_model import SPECIAL

MOST_CHOICES: Final = MOST_SEQUENCES
"""Of all prompts together: each is a request of the model."""
_MOST_LOGPROBS: Final = 20
_LEAST_PRIORITY: Final = 2**31 - 1
DEFAULT_TOKENS: Final = sampling.Setting(16, "max_tokens")
"""OpenAI's own, for completions that do not say how many."""
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
"""Fields of OpenAI's that do not change what is answered."""
_IDS: Final = ("prompt_cache_key", "safety_identifier", "user")
"""Those of them that name somebody or something."""
_KNOWN: Final = frozenset(
    (
        *("model", "prompt", "n", "best_of", "echo", "logprobs", "max_tokens", "stream", "stream_options", "suffix"),
        SPECIAL,
        "priority",
        *sampling.COMMON,
        *IGNORED,
    )
)


class Wanted(NamedTuple):
    """What completions of both kinds have in common."""

    model: str
    n: int
    sampling: Sampling
    stream: bool
    usage: bool
    """A stream ends with the numbers of tokens."""
    logprobs: int
    """So many likely tokens at each place; below 0: not even the chosen ones."""
    special: bool | None
    """Whether the tokenizer adds special tokens to the prompt; None: as is usual with one of this kind."""
    priority: int
    """KServe's and vLLM's: the higher the number, the longer it may wait."""


class CompletionRequest(NamedTuple):
    """A body, understood."""

    wanted: Wanted
    prompts: Sequence[bytes | memoryview]
    """As UTF-8."""
    echo: bool


def read(body: Buffer) -> CompletionRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.refuse_unknown(_KNOWN)
    model = fields.name("model")
    n = fields.integer("n", 1, 1, MOST_CHOICES)
    best_of = fields.integer("best_of", n, 1, MOST_CHOICES)
    if best_of != n:
        raise not_offered("best_of", "every choice is returned, so that it can only be what 'n' is.")
    if fields.text("suffix", ""):
        raise not_offered("suffix", "suffix is not currently supported")
    echo = fields.flag("echo")
    count = fields.integer("logprobs", -1, 0, _MOST_LOGPROBS) if "logprobs" in fields else -1
    if echo and count >= 0:
        raise not_offered("echo", "the prompt's own tokens have no 'logprobs' here: leave one of the two out.")
    settings = sampling.read(fields, ("max_tokens",))
    prompts = _prompts(fields)
    if len(prompts) * n > MOST_CHOICES:
        raise wrong_value("n", f"no more than {MOST_CHOICES} choices for all {len(prompts)} prompts together", n)
    return CompletionRequest(wanted(fields, model, n, settings, count), [text.encode() for text in prompts], echo)


def wanted(
    fields: Fields, model: str, n: int, settings: Sampling, logprobs: int, counted_in: str = "logprobs"
) -> Wanted:
    """Return what both kinds have in common. ``counted_in`` is the field that says how many ``logprobs``."""
    for name in _IDS:
        fields.name(name, "")
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options.values and not stream:
        raise ApiError("`stream_options` can only be used when `stream` is True", "stream_options", "invalid_parameter")
    options.refuse_unknown(("include_usage", "include_obfuscation"))
    if logprobs >= 0:
        settings["logprobs"] = sampling.Setting(logprobs, counted_in)
    priority = fields.integer("priority", 0, 0, _LEAST_PRIORITY)
    special = fields.flag(SPECIAL) if SPECIAL in fields else None
    return Wanted(model, n, settings, stream, options.flag("include_usage"), logprobs, special, priority)


def _prompts(fields: Fields) -> list[str]:
    if "prompt" not in fields:
        raise missing("prompt")
    given: Any = fields["prompt"]
    prompts = given if isinstance(given, list) else [given]
    check_count("prompt", prompts, MOST_CHOICES)
    if any(isinstance(prompt, (int, list)) for prompt in prompts):
        raise not_offered("prompt", "a prompt is a string, or an array of strings; tokens are the model's business.")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise wrong_type("prompt", "a string or an array of strings", given)
    if not prompts or "" in prompts:
        raise ApiError("prompt must be non-empty", "prompt", "invalid_value")
    return prompts
