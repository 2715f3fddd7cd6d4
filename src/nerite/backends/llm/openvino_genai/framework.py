"""OpenVINO GenAI itself: the import, and the pipelines that options ask for."""

from __future__ import annotations

import random
from collections.abc import Collection
from types import ModuleType
from typing import Any

from nerite.backends.llm.openvino_genai.options import Options
from nerite.backends.llm.sampling import SamplingParameters
from nerite.backends.openvino.framework import openvino
from nerite.core.errors import Unsupported


def genai() -> ModuleType:
    """Return the package's library. Raises ``Unsupported`` where it cannot be imported."""
    openvino()  # First, and without its telemetry.
    try:
        from openvino_genai import py_openvino_genai
    except ImportError as error:
        raise Unsupported(f"unable to import openvino_genai ({error}): pip install 'nerite[llm]'") from error
    return py_openvino_genai  # type: ignore[no-any-return]  # The package has no types.


def pipeline(options: Options) -> Any:
    """Load a model. Raises what the framework raises."""
    library = genai()
    scheduling = library.SchedulerConfig()
    scheduling.max_num_seqs = options.most_sequences
    scheduling.max_num_batched_tokens = options.batched_tokens
    scheduling.enable_prefix_caching = options.prefix_caching
    if options.cache_blocks:
        scheduling.num_kv_blocks = options.cache_blocks
    else:
        scheduling.cache_size = options.cache_gb
    return library.ContinuousBatchingPipeline(
        str(options.directory), scheduling, options.device, dict(options.properties or {})
    )


def generation(sampling: SamplingParameters, index: int, room: int, ends: Collection[int]) -> Any:
    """Return how one of the sequences of a request is generated: ``room`` tokens at most, until one of ``ends``.

    Stop strings are not in it: they are looked for in the text that is handed out. Nor are stop tokens where those
    of the model are ignored: the framework then ignores all of them. Raises what the framework raises.
    """
    config = genai().GenerationConfig()
    config.max_new_tokens = min(sampling.max_tokens or room, room)
    config.min_new_tokens = min(sampling.min_tokens, config.max_new_tokens)
    config.ignore_eos = sampling.ignore_eos
    if not sampling.ignore_eos:
        config.stop_token_ids = {*sampling.stop_token_ids, *ends}
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    config.repetition_penalty = sampling.repetition_penalty
    if sampling.logprobs is not None:
        config.logprobs = 1
    if sampling.temperature > 0:
        config.do_sample = True
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k:
            config.top_k = sampling.top_k
        # Of itself the framework would have the same one for each request.
        config.rng_seed = random.getrandbits(63) if sampling.seed is None else (sampling.seed + index) % 2**63
    config.validate()
    return config
