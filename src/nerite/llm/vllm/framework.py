"""Everything that touches vLLM's API: import, engine arguments, engine creation, and conversion of parameters."""

from __future__ import annotations

import dataclasses
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
from nerite.core.bounded_files import read_json
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotInstalled, Unavailable
from nerite.core.tensor import Array
from nerite.llm import checkpoint, selection
from nerite.llm.engine import GenerationRequest
from nerite.llm.selection import Speculation

# Arguments of the engine, from model.json or from a checkpoint and the configuration's parameters

_ADAPTERS: Final = "multi_lora.json"
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``max_lora_rank``."""

_NUMBERS: Final = {
    "MAX_MODEL_LEN": "max_model_len",
    "MAX_NUM_SEQS": "max_num_seqs",
    "MAX_NUM_BATCHED_TOKENS": "max_num_batched_tokens",
    "NUM_KV_BLOCKS": "num_gpu_blocks_override",
    "PIPELINE_PARALLEL_SIZE": "pipeline_parallel_size",
    "TENSOR_PARALLEL_SIZE": "tensor_parallel_size",
}
"""vLLM's names for configuration parameters."""
_SLEEP: Final = "ENABLE_SLEEP_MODE"
KNOWN: Final = frozenset({*_NUMBERS, selection.CACHE, selection.PREFIX_CACHING, _SLEEP, *selection.SPECULATION})
_LEADER: Final = "LWS_LEADER_ADDRESS"
"""Variable with the address of the first pod of a LeaderWorkerSet's group, which runs the server."""
_TRITON_PARAMETERS: Final = frozenset({"ENABLE_VLLM_HEALTH_CHECK", "REPORT_CUSTOM_METRICS"})
"""Parameters of Triton's vLLM backend that are accepted; what they enable is always on here."""


@dataclass(frozen=True)
class VllmArguments:
    """Arguments of an engine."""

    name: str
    """Name of the instance."""
    engine: Mapping[str, Any]
    """Arguments of vLLM's ``AsyncEngineArgs``."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Paths of the LoRA adapters that a request may choose, by name."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, which vLLM reads some settings from."""


def read_arguments(context: ModelContext, instance: InstanceContext | None = None) -> VllmArguments:
    """Read the arguments from files and configuration; no instance is needed to check them. Raises ``NeriteError``."""
    given = _file(context)
    if "model" not in given:
        given["model"] = str(context.version_directory.absolute())
    selection.check_parameters(context, KNOWN | _TRITON_PARAMETERS, "the engine vllm")
    given |= _parameter_arguments(context)
    # Older versions of vLLM had the opposite flag.
    if "disable_log_requests" in given:
        given["enable_log_requests"] = not given.pop("disable_log_requests")
    if "enable_sleep_mode" in given:
        given["enable_sleep_mode"] = is_true(given["enable_sleep_mode"])
    # Among equal priorities it is first come, first served, so requests without a priority are not affected.
    given.setdefault("scheduling_policy", "priority")
    adapters = _with_adapters(context, given)
    kinds = {group.get("kind") for group in context.config.get("instance_group", ())}
    if kinds & {"KIND_GPU"} and int(given.get("tensor_parallel_size", 1)) > 1:
        raise InvalidArgument(
            "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's 'instance_group' "
            "for multi-GPU models."
        )
    if given.get("distributed_executor_backend") == "ray" and os.environ.get(selection.RESERVED_GPUS):
        # vLLM would wait endlessly for GPUs that its own server has (ray-project/ray#59064).
        raise InvalidArgument(
            f"model '{context.name}': vLLM asks Ray for GPUs itself, and this server has reserved "
            f"{os.environ[selection.RESERVED_GPUS]} already. Write engine-places-gpus = true instead of gpus in "
            "[pool.resources] of the cluster file, or remove distributed_executor_backend from model.json"
        )
    if int(given.get("nnodes", 1)) > 1 and (leader := os.environ.get(_LEADER)):
        given.setdefault("master_addr", leader)
    name = context.name if instance is None else instance.name
    return VllmArguments(name, given, adapters, {} if instance is None else _variables(context, instance))


def _file(context: ModelContext) -> dict[str, Any]:
    file = context.version_directory / checkpoint.ARGUMENTS
    if not file.is_file():
        if checkpoint.checkpoint_content(context.version_directory) is checkpoint.CheckpointContent.CHECKPOINT:
            return {}
        raise Unavailable(f"model '{context.name}': '{context.version_directory}' has no {checkpoint.ARGUMENTS}")
    return _object(file)


def _parameter_arguments(context: ModelContext) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: selection.count_parameter(context, key) for key, name in _NUMBERS.items() if context.parameter(key)
    }
    if context.parameter(selection.PREFIX_CACHING):
        given["enable_prefix_caching"] = configuration.flag(context, selection.PREFIX_CACHING, default=True)
    if context.parameter(_SLEEP):
        given["enable_sleep_mode"] = configuration.flag(context, _SLEEP, default=False)
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
    """Return the adapters of a model, and configure their number and rank in ``given``."""
    file = context.version_directory / _ADAPTERS
    if not is_true(given.get("enable_lora", False)):
        return {}
    given["enable_lora"] = True
    # One slot more than the adapters that run at the same time: if all slots are in use, vLLM's CPU kernels answer
    # requests without an adapter with the last adapter.
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
        raise InvalidArgument(f"the adapter '{name}' in {_ADAPTERS} of model '{context.name}' must be a directory")
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
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"'{file}' cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"'{file}' must hold a JSON object")
    return found


def is_true(value: Any) -> bool:
    """Return whether a flag of model.json is set, as JSON or, as Triton's pages also write it, as text."""
    return value is True or (isinstance(value, str) and value.lower() == "true")


_log = logging.getLogger("nerite.llm")

VARIABLES: Final[Mapping[str, str]] = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Environment variables for vLLM, unless the server's environment sets them."""
_GUARD: Final = 'read -r _; kill -9 "-$0"'
_FORMS: Final[Mapping[str, str]] = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""vLLM's names for kinds of grammars."""
GRAMMARS: Final = frozenset(_FORMS)
_SAME: Final = (
    *("n", "max_tokens", "min_tokens", "ignore_eos", "seed", "temperature", "top_p", "top_k", "min_p", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
)
"""Sampling parameters that are passed to vLLM unchanged."""
SAMPLING: Final = frozenset(
    {
        *_SAME,
        *("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"),
        *("lora_name", "grammar", "priority", "truncate_prompt_tokens", "prompt_logprobs"),
    }
)
"""All supported sampling parameters."""

Stepped = Callable[[Any, Any], None]
"""Called with vLLM's statistics of the scheduler and of the step, each of which may be None."""


def begin(arguments: VllmArguments) -> None:
    """Prepare this process and import vLLM. Raises ``Unsupported`` if vLLM cannot be imported."""
    for name, value in {**VARIABLES, **arguments.variables}.items():
        os.environ.setdefault(name, value)
    end_children_with_us()
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise NotInstalled(f"unable to import vllm ({error}): nerite engines install vllm") from error


def end_children_with_us() -> None:
    """Make the processes that vLLM starts end with this one, however it ends: they do not do so themselves."""
    if os.getpgrp() != os.getpid():  # a session leader already leads its process group
        os.setpgid(0, 0)
    # The shell reads from a pipe whose other end closes with this process.
    subprocess.Popen(["/bin/sh", "-c", _GUARD, str(os.getpgrp())], stdin=subprocess.PIPE)


def engine(arguments: VllmArguments, stepped: Stepped) -> Any:
    """Return an ``AsyncLLM``. Must be called in a running event loop. Raises what vLLM raises."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Steps(StatLoggerBase):  # type: ignore[misc]  # vLLM is not installed where types are checked
        """Statistics logger, which vLLM calls after each step, when the step's output can be collected."""

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
            raise InvalidArgument(f"'{name}' is not an argument of vLLM.{hint}")
    # Disables only the logging; our statistics logger is still called.
    given = {**arguments.engine, "disable_log_stats": True}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**given), stat_loggers=[Steps])


def prompt(tokens: list[int], salt: str = "") -> Any:
    """Convert a prompt to vLLM's format. Only prompts with the same salt share its cached blocks."""
    from vllm.inputs import tokens_input

    return tokens_input(tokens, cache_salt=salt or None)


def sees(engine: Any) -> bool:
    """Return whether the model takes images."""
    processor = engine.renderer.mm_processor
    return processor is not None and processor.info.allowed_mm_limits.get("image", 0) > 0


async def with_images(engine: Any, tokens: list[int], images: Sequence[Array], salt: str) -> tuple[Any, int, int]:
    """Convert a prompt with images to vLLM's format; also return its number of tokens, and how many are images'.

    vLLM does the work in a thread. Raises what vLLM raises.
    """
    given: dict[str, Any] = {"prompt_token_ids": tokens, "multi_modal_data": {"image": list(images)}}
    if salt:
        given["cache_salt"] = salt
    (rendered,) = await engine.renderer.render_cmpl_async([given])
    image_tokens = sum(place.length for place in rendered["mm_placeholders"]["image"])
    return rendered, len(rendered["prompt_token_ids"]), image_tokens


def adapters(arguments: VllmArguments) -> dict[str, Any]:
    """Return vLLM's objects for the LoRA adapters, by name."""
    numbered = enumerate(arguments.adapters.items(), start=1)
    return {name: adapter(name, number, path) for number, (name, path) in numbered}


def adapter(name: str, number: int, path: str) -> Any:
    """Return vLLM's object for a LoRA adapter, which it knows by its number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, path)


def sampling(request: GenerationRequest) -> Any:
    """Convert the sampling parameters of a request to vLLM's. Raises what vLLM raises."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    wanted = request.sampling
    form = None
    if request.grammar is not None:
        form = StructuredOutputsParams(**{_FORMS[request.grammar.kind]: request.grammar.source})
    given = {name: getattr(wanted, name) for name in _SAME}
    return SamplingParams(
        **given,
        stop=list(wanted.stop),
        stop_token_ids=list(wanted.stop_token_ids),
        bad_words=list(wanted.bad_words),
        allowed_token_ids=None if wanted.allowed_token_ids is None else list(wanted.allowed_token_ids),
        logit_bias=dict(wanted.logit_bias) or None,
        prompt_logprobs=wanted.prompt_logprobs,
        structured_outputs=form,
        output_kind=RequestOutputKind.DELTA,
    )


def translated(error: Exception, doing: str) -> NeriteError:
    """Convert an error of vLLM to a ``NeriteError``."""
    if isinstance(error, NeriteError):
        return error
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    text = f"vllm error in {doing}: {error or type(error).__name__}"
    if isinstance(error, EngineDeadError):
        return Unavailable(text)
    return InvalidArgument(text) if isinstance(error, (VLLMClientError, ValueError, TypeError)) else Internal(text)
