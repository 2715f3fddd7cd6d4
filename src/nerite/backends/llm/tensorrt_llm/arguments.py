"""How an engine of TensorRT-LLM has to be made: from a checkpoint and the parameters of the configuration."""

from __future__ import annotations

from typing import Any, Final

from nerite.backends import values
from nerite.backends.interface import ModelContext
from nerite.backends.llm import parameters

_NUMBERS: Final = {
    "MAX_MODEL_LEN": "max_seq_len",
    "MAX_NUM_SEQS": "max_batch_size",
    "MAX_NUM_BATCHED_TOKENS": "max_num_tokens",
    "PIPELINE_PARALLEL_SIZE": "pipeline_parallel_size",
    "TENSOR_PARALLEL_SIZE": "tensor_parallel_size",
}
"""Parameters of the configuration, and what TensorRT-LLM calls them."""
KNOWN: Final = frozenset({*_NUMBERS, parameters.CACHE, parameters.PREFIX_CACHING})


def read(context: ModelContext) -> dict[str, Any]:
    """Return what ``tensorrt_llm.LLM`` is given; ``kv_cache`` is for its ``KvCacheConfig``. Raises ``NeriteError``."""
    parameters.check(context, KNOWN, "the engine tensorrt_llm")
    given: dict[str, Any] = {"model": str(context.version_directory.absolute())}
    given |= {name: parameters.count(context, key) for key, name in _NUMBERS.items() if context.parameter(key)}
    cache: dict[str, Any] = {"enable_block_reuse": values.flag(context, parameters.PREFIX_CACHING, default=True)}
    if context.parameter(parameters.CACHE):
        cache["max_gpu_total_bytes"] = parameters.count(context, parameters.CACHE) << 30
    return {**given, "kv_cache": cache}
