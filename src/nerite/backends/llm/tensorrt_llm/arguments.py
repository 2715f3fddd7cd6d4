"""How an engine of TensorRT-LLM has to be made: from a checkpoint and the parameters of the configuration."""

from __future__ import annotations

from typing import Any, Final

from nerite.backends import values
from nerite.backends.interface import ModelContext
from nerite.config.near import nearest
from nerite.core.errors import InvalidArgument

_NUMBERS: Final = {
    "MAX_MODEL_LEN": "max_seq_len",
    "MAX_NUM_SEQS": "max_batch_size",
    "MAX_NUM_BATCHED_TOKENS": "max_num_tokens",
    "PIPELINE_PARALLEL_SIZE": "pipeline_parallel_size",
    "TENSOR_PARALLEL_SIZE": "tensor_parallel_size",
}
"""Parameters of the configuration, and what TensorRT-LLM calls them."""
_PREFIXES: Final = "ENABLE_PREFIX_CACHING"
_CACHE: Final = "KV_CACHE_GB"
_ELSEWHERE: Final = ("ENGINE", "EXECUTION_ENV_PATH", "EXECUTION_MODE", "STEP_TIMEOUT_SECONDS", "WORKER")
_CLOSE: Final = 0.8


def read(context: ModelContext) -> dict[str, Any]:
    """Return what ``tensorrt_llm.LLM`` is given; ``kv_cache`` is for its ``KvCacheConfig``. Raises ``NeriteError``."""
    known = (*_NUMBERS, _PREFIXES, _CACHE, *_ELSEWHERE)
    for key in context.config.get("parameters", {}):
        if key not in known and (meant := nearest(key.upper(), known, _CLOSE)):
            raise InvalidArgument(f"model '{context.name}' has the parameter '{key}'. Did you mean {meant}?")
    given: dict[str, Any] = {"model": str(context.version_directory.absolute())}
    given |= {name: _count(context, key) for key, name in _NUMBERS.items() if context.parameter(key)}
    cache: dict[str, Any] = {"enable_block_reuse": values.flag(context, _PREFIXES, default=True)}
    if context.parameter(_CACHE):
        cache["max_gpu_total_bytes"] = _count(context, _CACHE) << 30
    return {**given, "kv_cache": cache}


def _count(context: ModelContext, key: str) -> int:
    number = values.parameter(context, key, "", values.integer, "a number above 0")
    if number < 1:
        raise InvalidArgument(f"parameter '{key}' of model '{context.name}' is {number}; it has to be above 0")
    return number
