"""The engine for TensorRT-LLM, through its LLM API. Written from its documentation and never run: see docs/llm.md."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Final

from nerite.backends import configuration
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.llm import selection
from nerite.llm.engine import Capabilities, FinishReason, GenerationRequest, LoopEngine, RequestListener, TokenDelta

_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "cancelled": FinishReason.ABORT,
}
_SAMPLING: Final = frozenset(
    {
        *("n", "max_tokens", "min_tokens", "ignore_eos", "seed", "temperature", "top_p", "top_k"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
        *("lora_name", "grammar", "priority"),
    }
)
"""Known parameters. ``lora_name`` and ``grammar`` have their own error messages; the server handles ``priority``."""
_STATS_SECONDS: Final = 0.5
"""Interval at which the engine's statistics are read."""


class TensorRtLlmEngine(LoopEngine):
    """Runs TensorRT-LLM's ``LLM`` in an event loop, with one task per request, as its API requires."""

    name = "tensorrt_llm"
    sampling = _SAMPLING

    def __init__(self, arguments: Mapping[str, Any], instance: InstanceContext) -> None:
        super().__init__()
        self._arguments = dict(arguments)
        self._instance = instance
        self._model: Any = None
        self._running: dict[str, Any] = {}
        """TensorRT-LLM's result object of each running request."""
        self._tasks: set[asyncio.Task[None]] = set()
        """One task per request that runs or is being started."""
        self._used = 0
        """Used blocks of the KV cache."""

    def abort(self, id: str) -> None:
        """Abort a request if it runs."""
        self._loop.call_soon_threadsafe(self._abort, id)

    def _prepare(self) -> None:
        if self._instance.kind == "GPU":
            os.environ["CUDA_VISIBLE_DEVICES"] = str(self._instance.device)
        try:
            import tensorrt_llm  # noqa: F401
        except ImportError as error:
            raise Unsupported(
                f"unable to import tensorrt_llm ({error}): nerite engines install tensorrt-llm"
            ) from error

    def _take(self, request: GenerationRequest, tokens: list[int], listener: RequestListener) -> None:
        self._loop.call_soon_threadsafe(self._start_task, request, tokens, listener)

    def _usage(self) -> tuple[int, int, int]:
        return len(self._running), len(self._tasks) - len(self._running), self._used if self._running else 0

    def _translated(self, error: Exception, doing: str) -> NeriteError:
        return _translated(error, doing)

    # The engine's thread

    async def _load(self) -> None:
        from tensorrt_llm import LLM
        from tensorrt_llm.llmapi import KvCacheConfig

        given = dict(self._arguments)
        cache = KvCacheConfig(**given.pop("kv_cache"))
        self._model = LLM(kv_cache_config=cache, enable_iter_perf_stats=True, **given)
        self._tokenizer = self._model.tokenizer
        effective = self._model.args
        length = effective.max_seq_len or given.get("max_seq_len") or self._tokenizer.tokenizer.model_max_length
        self._able = Capabilities(self.name, int(length), int(effective.max_batch_size))

    async def _work(self) -> None:
        polling = asyncio.create_task(self._poll_stats())
        await self._wake.wait()  # set only by ``stop``
        polling.cancel()
        for id in list(self._running):
            self._abort(id)
        await asyncio.gather(*self._tasks, polling, return_exceptions=True)

    def _release(self) -> None:
        if self._model is not None:
            self._model.shutdown()

    async def _poll_stats(self) -> None:
        """Read the engine's statistics periodically."""
        while True:
            async for stats in self._model.get_stats_async(timeout=_STATS_SECONDS):
                cache = stats.get("kvCacheStats") or {}
                names = ("maxNumBlocks", "freeNumBlocks", "tokensPerBlock")
                total, free, size = (int(cache.get(name, 0)) for name in names)
                self._blocks, self._used = (total, size), total - free
            await asyncio.sleep(_STATS_SECONDS)

    def _start_task(self, request: GenerationRequest, tokens: list[int], listener: RequestListener) -> None:
        task = asyncio.create_task(self._run_request(request, tokens, listener))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_request(self, request: GenerationRequest, tokens: list[int], listener: RequestListener) -> None:
        try:
            sampling = _sampling(request, self._able.context_length - len(tokens))
            salt = request.cache_salt or None
            result = self._model.generate_async(tokens, sampling, streaming=True, cache_salt=salt)
        except Exception as error:  # affects only this request
            listener.failed(_translated(error, "starting a request"))
            self._stepped(self.stats())
            return
        self._running[request.id] = result
        self._prompt_tokens += len(tokens)
        listener.admitted(len(tokens))
        try:
            async for output in result:
                self._deliver(output, listener)
        except Exception as error:
            listener.failed(_translated(error, "a step of the engine"))
        del self._running[request.id]
        self._stepped(self.stats())

    def _deliver(self, output: Any, listener: RequestListener) -> None:
        deltas = []
        for each in output.outputs:
            reason = None if each.finish_reason is None else _REASONS.get(each.finish_reason, FinishReason.ABORT)
            tokens = list(each.token_ids_diff)
            if tokens or each.text_diff or reason is not None:
                self._generated_tokens += len(tokens)
                deltas.append(TokenDelta(each.index, tokens, each.text_diff, (), reason))
        if deltas:
            listener.advanced(deltas)
            self._stepped(self.stats())

    def _abort(self, id: str) -> None:
        if id in self._running:
            self._running[id].abort()


def _sampling(request: GenerationRequest, room: int) -> Any:
    """Convert the sampling parameters of a request to TensorRT-LLM's. Raises what TensorRT-LLM raises."""
    from tensorrt_llm import SamplingParams

    wanted = request.sampling
    greedy = wanted.temperature == 0
    return SamplingParams(
        n=wanted.n,
        max_tokens=min(wanted.max_tokens or room, room),
        min_tokens=wanted.min_tokens or None,
        temperature=None if greedy else wanted.temperature,
        top_k=1 if greedy else wanted.top_k or None,
        top_p=None if greedy else wanted.top_p,
        seed=wanted.seed,
        presence_penalty=wanted.presence_penalty or None,
        frequency_penalty=wanted.frequency_penalty or None,
        repetition_penalty=wanted.repetition_penalty if wanted.repetition_penalty != 1 else None,
        stop=list(wanted.stop) or None,
        stop_token_ids=list(wanted.stop_token_ids) or None,
        include_stop_str_in_output=wanted.include_stop_str_in_output,
        ignore_eos=wanted.ignore_eos,
        skip_special_tokens=wanted.skip_special_tokens,
    )


def _translated(error: Exception, doing: str) -> NeriteError:
    if isinstance(error, NeriteError):
        return error
    text = f"TensorRT-LLM error in {doing}: {error or type(error).__name__}"
    return InvalidArgument(text) if isinstance(error, (TypeError, ValueError)) else Internal(text)


# Arguments of the engine, from the checkpoint and the configuration

_NUMBERS: Final = {
    "MAX_MODEL_LEN": "max_seq_len",
    "MAX_NUM_SEQS": "max_batch_size",
    "MAX_NUM_BATCHED_TOKENS": "max_num_tokens",
    "PIPELINE_PARALLEL_SIZE": "pipeline_parallel_size",
    "TENSOR_PARALLEL_SIZE": "tensor_parallel_size",
}
"""TensorRT-LLM's names for configuration parameters."""
KNOWN: Final = frozenset({*_NUMBERS, selection.CACHE, selection.PREFIX_CACHING})


def read_arguments(context: ModelContext) -> dict[str, Any]:
    """Return the arguments of ``tensorrt_llm.LLM``; ``kv_cache`` is for ``KvCacheConfig``. Raises ``NeriteError``."""
    selection.check_parameters(context, KNOWN, "the engine tensorrt_llm")
    given: dict[str, Any] = {"model": str(context.version_directory.absolute())}
    given |= {name: selection.count_parameter(context, key) for key, name in _NUMBERS.items() if context.parameter(key)}
    cache: dict[str, Any] = {"enable_block_reuse": configuration.flag(context, selection.PREFIX_CACHING, default=True)}
    if context.parameter(selection.CACHE):
        cache["max_gpu_total_bytes"] = selection.count_parameter(context, selection.CACHE) << 30
    return {**given, "kv_cache": cache}


def check(context: ModelContext) -> None:
    """Raise ``NeriteError`` if the engine does not support the configuration."""
    read_arguments(context)


def engine(model: ModelContext, instance: InstanceContext) -> TensorRtLlmEngine:
    """Return an engine for an instance. Raises ``NeriteError``."""
    return TensorRtLlmEngine(read_arguments(model), instance)


__all__ = ["TensorRtLlmEngine", "check", "engine"]
