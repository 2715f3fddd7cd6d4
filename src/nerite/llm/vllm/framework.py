"""vLLM itself: the import, the engine that arguments ask for, and its words for what we say."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nerite.backends import configuration
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.config.mistake import nearest
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotHere, Unavailable
from nerite.core.tensor import Array
from nerite.llm import checkpoint, selection
from nerite.llm.engine import GenerationRequest
from nerite.llm.selection import Speculation

# How an engine of vLLM has to be made: from model.json, or from a checkpoint and the configuration's parameters.

_ADAPTERS: Final = "multi_lora.json"
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank of adapters."""

_NUMBERS: Final = {
    "MAX_MODEL_LEN": "max_model_len",
    "MAX_NUM_SEQS": "max_num_seqs",
    "MAX_NUM_BATCHED_TOKENS": "max_num_batched_tokens",
    "NUM_KV_BLOCKS": "num_gpu_blocks_override",
    "PIPELINE_PARALLEL_SIZE": "pipeline_parallel_size",
    "TENSOR_PARALLEL_SIZE": "tensor_parallel_size",
}
"""Parameters of the configuration, and what vLLM calls them."""
KNOWN: Final = frozenset({*_NUMBERS, selection.CACHE, selection.PREFIX_CACHING, *selection.SPECULATION})
_OF_TRITONS: Final = frozenset({"ENABLE_VLLM_HEALTH_CHECK", "REPORT_CUSTOM_METRICS"})
"""Of Triton's vLLM backend: what they ask for is always so here."""


@dataclass(frozen=True)
class VllmArguments:
    """What an engine is made of."""

    name: str
    """Of the instance."""
    engine: Mapping[str, Any]
    """For vLLM's ``AsyncEngineArgs``."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters that a request may choose, by name, and where they are."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, where vLLM reads some of what it is told."""


def read_arguments(context: ModelContext, instance: InstanceContext | None = None) -> VllmArguments:
    """Return what files and configuration say; without an instance, for a look. Raises ``NeriteError``."""
    given = _file(context)
    if "model" not in given:
        given["model"] = str(context.version_directory.absolute())
    selection.check_parameters(context, KNOWN | _OF_TRITONS, "the engine vllm")
    given |= _of_parameters(context)
    # vLLM has gone from a switch that is off to one that is on.
    if "disable_log_requests" in given:
        given["enable_log_requests"] = not given.pop("disable_log_requests")
    # First come, first served among equals, so that it changes nothing for who does not ask.
    given.setdefault("scheduling_policy", "priority")
    adapters = _with_adapters(context, given)
    kinds = {group.get("kind") for group in context.config.get("instance_group", ())}
    if kinds & {"KIND_GPU"} and int(given.get("tensor_parallel_size", 1)) > 1:
        raise InvalidArgument(
            "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's 'instance_group' "
            "for multi-GPU models."
        )
    name = context.name if instance is None else instance.name
    return VllmArguments(name, given, adapters, {} if instance is None else _variables(context, instance))


def _file(context: ModelContext) -> dict[str, Any]:
    file = context.version_directory / checkpoint.ARGUMENTS
    if not file.is_file():
        if checkpoint.checkpoint_content(context.version_directory) is checkpoint.CheckpointContent.CHECKPOINT:
            return {}
        raise Unavailable(f"model '{context.name}': '{context.version_directory}' has no {checkpoint.ARGUMENTS}")
    return _object(file)


def _of_parameters(context: ModelContext) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: selection.count_parameter(context, key) for key, name in _NUMBERS.items() if context.parameter(key)
    }
    if context.parameter(selection.PREFIX_CACHING):
        given["enable_prefix_caching"] = configuration.flag(context, selection.PREFIX_CACHING, default=True)
    if context.parameter(selection.CACHE):
        given["kv_cache_memory_bytes"] = selection.count_parameter(context, selection.CACHE) << 30
    if guessing := _speculation(context, selection.speculation(context)):
        given["speculative_config"] = guessing
    return given


def _speculation(context: ModelContext, wanted: Speculation) -> dict[str, Any]:
    if wanted.draft:
        beside = context.version_directory / wanted.draft
        place = str(beside) if beside.is_dir() else wanted.draft
        return {"method": "draft_model", "model": place, "num_speculative_tokens": wanted.guesses}
    if wanted.lookup:
        looked = {"prompt_lookup_max": wanted.lookup, "prompt_lookup_min": 1}
        return {"method": "ngram", **looked, "num_speculative_tokens": wanted.guesses}
    return {}


def _with_adapters(context: ModelContext, given: dict[str, Any]) -> dict[str, str]:
    """Return the adapters of a model, and have ``given`` make room for them."""
    file = context.version_directory / _ADAPTERS
    if not _true(given.get("enable_lora", False)):
        return {}
    given["enable_lora"] = True
    # One slot more than adapters that run at the same time: where all are taken, vLLM's kernels for processors give
    # requests without an adapter the last one's answers.
    given["max_loras"] = int(given.get("max_loras", 1)) + 1
    if not file.is_file():
        return {}
    adapters = {name: _place(context, name, path) for name, path in _object(file).items()}
    if "max_lora_rank" not in given and adapters:
        largest = max(_rank(path) for path in adapters.values())
        given["max_lora_rank"] = next((rank for rank in _RANKS if rank >= max(largest, 16)), largest)
    return adapters


def _place(context: ModelContext, name: str, path: Any) -> str:
    if not isinstance(path, str) or not path:
        raise InvalidArgument(f"the adapter '{name}' in {_ADAPTERS} of model '{context.name}' has to be a directory")
    beside = context.version_directory / path
    return str(beside) if beside.is_dir() else path


def _rank(path: str) -> int:
    rank = checkpoint.describe_content(Path(path), "adapter_config.json").get("r")
    return rank if isinstance(rank, int) else 0


def _variables(context: ModelContext, instance: InstanceContext) -> dict[str, str]:
    variables = {}
    if instance.kind == "GPU":
        variables["CUDA_VISIBLE_DEVICES"] = str(instance.device)
    if instance.cores:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, instance.cores))
    return variables


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"'{file}' cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"'{file}' has to be a JSON object")
    return found


def _true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


_log = logging.getLogger("nerite.llm")

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


def begin(arguments: VllmArguments) -> None:
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


def engine(arguments: VllmArguments, stepped: Stepped) -> Any:
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


def adapters(arguments: VllmArguments) -> dict[str, Any]:
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
