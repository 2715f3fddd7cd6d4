"""The parameters of language models, which are one set for all engines: what an engine has not is refused by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from nerite.backends import values
from nerite.backends.interface import ModelContext
from nerite.backends.llm import tasks
from nerite.config import tenant_caches
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument, Unsupported

ENGINE: Final = "ENGINE"
STEP_TIMEOUT: Final = "STEP_TIMEOUT_SECONDS"
PREFIX_CACHING: Final = "ENABLE_PREFIX_CACHING"
CACHE: Final = "KV_CACHE_GB"

OF_OPENVINO: Final = frozenset(
    {
        "CACHE_DIR",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        "ENABLE_CPU_PINNING",
        "EXECUTION_MODE_HINT",
        "INFERENCE_PRECISION_HINT",
        "KV_CACHE_PRECISION",
    }
)
"""Properties of OpenVINO, which are handed on to it as they are."""
_OF_ALL: Final = frozenset(
    {ENGINE, "EXECUTION_ENV_PATH", "EXECUTION_MODE", STEP_TIMEOUT, tasks.PARAMETER, tenant_caches.PARAMETER, "WORKER"}
)
_DRAFT: Final = "SPECULATIVE_MODEL"
_LOOKUP: Final = "PROMPT_LOOKUP_MAX"
_GUESSES: Final = "NUM_SPECULATIVE_TOKENS"
SPECULATION: Final = frozenset({_DRAFT, _LOOKUP, _GUESSES})
OF_SOME: Final = frozenset(
    {
        *("MAX_MODEL_LEN", "MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS"),
        *(CACHE, "NUM_KV_BLOCKS", PREFIX_CACHING),
        *("PIPELINE_PARALLEL_SIZE", "TENSOR_PARALLEL_SIZE"),
        *("INFERENCE_NUM_THREADS", "TARGET_DEVICE", "WEIGHT_FORMAT"),
        *("NORMALIZE", "POOLING_TYPE"),
        *OF_OPENVINO,
        *SPECULATION,
    }
)
"""What one engine has, for one task, and another may have not."""
_CLOSE: Final = 0.8
_USUAL_GUESSES: Final = 5


class Speculation(NamedTuple):
    """How tokens are guessed ahead, if they are."""

    draft: str = ""
    """The directory of a smaller model, seen from the version directory."""
    lookup: int = 0
    """Instead of it: tokens that have to be the same for a guess from the text so far."""
    guesses: int = _USUAL_GUESSES
    """Tokens that are guessed at a time."""


def check(context: ModelContext, known: Collection[str], user: str) -> None:
    """Raise ``NeriteError`` for a parameter that means nothing to ``user``, who has those that are ``known``.

    What nobody here knows may be somebody else's, unless it is nearly one of ours.
    """
    for key in context.config.get("parameters", {}):
        if key in known or key in _OF_ALL:
            continue
        if key in OF_SOME:
            raise Unsupported(
                f"model '{context.name}' has the parameter '{key}', which {user} does not have: take it out, or "
                f"choose another {ENGINE}"
            )
        if meant := nearest(key.upper(), [*known, *_OF_ALL], _CLOSE):
            raise InvalidArgument(f"model '{context.name}' has the parameter '{key}'. Did you mean {meant}?")


def count(context: ModelContext, key: str, default: int = 0) -> int:
    """Return a parameter that is a number above 0; ``default`` where it does not say. Raises ``InvalidArgument``."""
    number = values.parameter(context, key, str(default), values.integer, "a number above 0")
    if number < 1 and context.parameter(key):
        raise InvalidArgument(f"parameter '{key}' of model '{context.name}' is {number}; it has to be above 0")
    return number


def speculation(context: ModelContext) -> Speculation:
    """Return how tokens are to be guessed. Raises ``InvalidArgument``."""
    made = Speculation(context.parameter(_DRAFT), count(context, _LOOKUP), count(context, _GUESSES, _USUAL_GUESSES))
    if made.draft and made.lookup:
        raise InvalidArgument(f"model '{context.name}' has {_DRAFT} and {_LOOKUP}: choose one")
    if context.parameter(_GUESSES) and not (made.draft or made.lookup):
        raise InvalidArgument(
            f"model '{context.name}' has {_GUESSES} and nothing that guesses tokens: say {_DRAFT}, or {_LOOKUP}"
        )
    return made
