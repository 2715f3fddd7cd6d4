"""vLLM itself: the import, the engine that arguments ask for, and its words for what we say."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from nerite.backends.llm.engine import GenerationRequest
from nerite.backends.llm.vllm.arguments import Arguments
from nerite.config.near import nearest
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotHere, Unavailable
from nerite.core.tensor import Array

_log = logging.getLogger("nerite.backends.llm")

VARIABLES: Final[Mapping[str, str]] = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""What vLLM reads, unless the server's environment says otherwise."""
_GUARD: Final = 'read -r _; kill -9 "-$0"'
_FORMS: Final[Mapping[str, str]] = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""Kinds of grammars, and what vLLM calls them."""
GRAMMARS: Final = frozenset(_FORMS)
_SAME: Final = (
    *("n", "max_tokens", "min_tokens", "ignore_eos", "seed", "temperature", "top_p", "top_k", "min_p", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
)
"""Sampling parameters that are vLLM's as they are."""
SAMPLING: Final = frozenset(
    {
        *_SAME,
        *("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"),
        *("lora_name", "grammar", "priority", "truncate_prompt_tokens"),
    }
)
"""All that we hand on, in one way or the other."""

Stepped = Callable[[Any, Any], None]
"""Called with vLLM's statistics of its scheduler and of the step, each of which may be None."""


def begin(arguments: Arguments) -> None:
    """Prepare this process, before vLLM is imported. Raises ``Unsupported`` where it cannot be imported."""
    for name, value in {**VARIABLES, **arguments.variables}.items():
        os.environ.setdefault(name, value)
    _end_children_with_us()
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise NotHere(f"unable to import vllm ({error}): nerite engines install vllm") from error


def _end_children_with_us() -> None:
    """Have the processes that vLLM starts end when this one does, however it ends: they do not see to it themselves."""
    if os.getpgrp() != os.getpid():  # as that of a session, a worker cannot be made the leader of a group
        os.setpgid(0, 0)
    # The shell reads from a pipe whose other end closes with this process.
    subprocess.Popen(["/bin/sh", "-c", _GUARD, str(os.getpgrp())], stdin=subprocess.PIPE)


def engine(arguments: Arguments, stepped: Stepped) -> Any:
    """Return an ``AsyncLLM``; in a running loop, which it will need. Raises what vLLM raises."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Steps(StatLoggerBase):  # type: ignore[misc]  # The package has no types where we are checked.
        """Hears of each step, when its outputs are there to be taken."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            stepped(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    known = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    for name in arguments.engine:
        if name not in known:
            meant = nearest(name, known)
            hint = f" Did you mean {meant}?" if meant else ""
            raise InvalidArgument(f"'{name}' is no argument of vLLM.{hint}")
    # Without its own statistics vLLM tells ours nothing, but it need not log them.
    given = {**arguments.engine, "disable_log_stats": True}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**given), stat_loggers=[Steps])


def prompt(tokens: list[int], salt: str = "") -> Any:
    """Return a prompt as vLLM has it. Its blocks are found again by prompts with the same salt alone."""
    from vllm.inputs import tokens_input

    return tokens_input(tokens, cache_salt=salt or None)


def sees(engine: Any) -> bool:
    """Return whether the model takes images."""
    processor = engine.renderer.mm_processor
    return processor is not None and processor.info.allowed_mm_limits.get("image", 0) > 0


async def with_images(engine: Any, tokens: list[int], images: Sequence[Array], salt: str) -> tuple[Any, int, int]:
    """Return a prompt with images as vLLM has it, how many tokens it has, and how many of them are images'.

    The work is done in a thread. Raises what vLLM raises.
    """
    said: dict[str, Any] = {"prompt_token_ids": tokens, "multi_modal_data": {"image": list(images)}}
    if salt:
        said["cache_salt"] = salt
    (rendered,) = await engine.renderer.render_cmpl_async([said])
    of_images = sum(place.length for place in rendered["mm_placeholders"]["image"])
    return rendered, len(rendered["prompt_token_ids"]), of_images


def adapters(arguments: Arguments) -> dict[str, Any]:
    """Return the LoRA adapters as vLLM has them, by name."""
    from vllm.lora.request import LoRARequest

    return {
        name: LoRARequest(name, number, path) for number, (name, path) in enumerate(arguments.adapters.items(), start=1)
    }


def sampling(request: GenerationRequest) -> Any:
    """Return how the tokens of a request are chosen, as vLLM has it. Raises what vLLM raises."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    said = request.sampling
    form = None
    if request.grammar is not None:
        form = StructuredOutputsParams(**{_FORMS[request.grammar.kind]: request.grammar.source})
    given = {name: getattr(said, name) for name in _SAME}
    return SamplingParams(
        **given,
        stop=list(said.stop),
        stop_token_ids=list(said.stop_token_ids),
        bad_words=list(said.bad_words),
        allowed_token_ids=None if said.allowed_token_ids is None else list(said.allowed_token_ids),
        logit_bias=dict(said.logit_bias) or None,
        structured_outputs=form,
        output_kind=RequestOutputKind.DELTA,
    )


def translated(error: Exception, doing: str) -> NeriteError:
    """Return an error of vLLM's as one of ours."""
    if isinstance(error, NeriteError):
        return error
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    text = f"vllm error in {doing}: {error or type(error).__name__}"
    if isinstance(error, EngineDeadError):
        return Unavailable(text)
    return InvalidArgument(text) if isinstance(error, (VLLMClientError, ValueError, TypeError)) else Internal(text)
