"""How an engine of vLLM has to be made: from model.json, or from a checkpoint and the configuration's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nerite.backends import values
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.llm import checkpoint, parameters
from nerite.backends.llm.parameters import Speculation
from nerite.core.errors import InvalidArgument, Unavailable

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
KNOWN: Final = frozenset({*_NUMBERS, parameters.CACHE, parameters.PREFIX_CACHING, *parameters.SPECULATION})
_OF_TRITONS: Final = frozenset({"ENABLE_VLLM_HEALTH_CHECK", "REPORT_CUSTOM_METRICS"})
"""Of Triton's vLLM backend: what they ask for is always so here."""


@dataclass(frozen=True)
class Arguments:
    """What an engine is made of."""

    name: str
    """Of the instance."""
    engine: Mapping[str, Any]
    """For vLLM's ``AsyncEngineArgs``."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters that a request may choose, by name, and where they are."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, where vLLM reads some of what it is told."""


def read(context: ModelContext, instance: InstanceContext | None = None) -> Arguments:
    """Return what files and configuration say; without an instance, for a look. Raises ``NeriteError``."""
    given = _file(context)
    if "model" not in given:
        given["model"] = str(context.version_directory.absolute())
    parameters.check(context, KNOWN | _OF_TRITONS, "the engine vllm")
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
    return Arguments(name, given, adapters, {} if instance is None else _variables(context, instance))


def _file(context: ModelContext) -> dict[str, Any]:
    file = context.version_directory / checkpoint.ARGUMENTS
    if not file.is_file():
        if checkpoint.content(context.version_directory) is checkpoint.Content.CHECKPOINT:
            return {}
        raise Unavailable(f"model '{context.name}': '{context.version_directory}' has no {checkpoint.ARGUMENTS}")
    return _object(file)


def _of_parameters(context: ModelContext) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: parameters.count(context, key) for key, name in _NUMBERS.items() if context.parameter(key)
    }
    if context.parameter(parameters.PREFIX_CACHING):
        given["enable_prefix_caching"] = values.flag(context, parameters.PREFIX_CACHING, default=True)
    if context.parameter(parameters.CACHE):
        given["kv_cache_memory_bytes"] = parameters.count(context, parameters.CACHE) << 30
    if guessing := _speculation(context, parameters.speculation(context)):
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
    rank = checkpoint.described(Path(path), "adapter_config.json").get("r")
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
