"""The engine: a thread with a loop, where a task follows each request: TensorRT-LLM hands its outputs out so only."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

from nerite.backends.interface import InstanceContext
from nerite.backends.llm.engine import (
    Capabilities,
    Delta,
    EngineStats,
    FinishReason,
    GenerationRequest,
    GivenUp,
    Listener,
    Stepped,
    refuse_what_is_lacking,
    refuse_what_is_unknown,
)
from nerite.core.errors import Internal, InvalidArgument, NeriteError, TooLate, Unavailable, Unsupported

_log = logging.getLogger("nerite.backends.llm")

NAME: Final = "tensorrt_llm"
_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "cancelled": FinishReason.ABORT,
}
_SAMPLING: Final = frozenset(
    {
        *("n", "max_tokens", "min_tokens", "ignore_eos", "seed", "temperature", "top_p", "top_k"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "lora_name", "grammar"),
    }
)
"""What we hand on; ``lora_name`` and ``grammar`` are refused in words of their own."""
_LOOK_AGAIN: Final = 0.5
"""Seconds between two looks at the engine's statistics."""


class TensorRtLlmEngine:
    """TensorRT-LLM's ``LLM``."""

    def __init__(self, arguments: Mapping[str, Any], instance: InstanceContext) -> None:
        self._arguments = dict(arguments)
        self._instance = instance
        self._model: Any = None
        self._able: Capabilities
        self._stepped: Stepped
        self._given_up: GivenUp
        self._loop: asyncio.AbstractEventLoop
        self._ready: Future[None] = Future()
        self._end: asyncio.Event
        self._running: dict[str, Any] = {}
        """Requests, and what TensorRT-LLM knows them by."""
        self._coming: deque[str] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._blocks = (0, 0, 0)
        """All, free ones, and the tokens in one."""
        self._prompt_tokens = self._generated_tokens = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="engine", daemon=True)

    def start(self, stepped: Stepped, given_up: GivenUp) -> None:
        """Load the model. Raises ``NeriteError``."""
        self._stepped, self._given_up = stepped, given_up
        if self._instance.kind == "GPU":
            os.environ["CUDA_VISIBLE_DEVICES"] = str(self._instance.device)
        try:
            import tensorrt_llm  # noqa: F401
        except ImportError as error:
            raise Unsupported(
                f"unable to import tensorrt_llm ({error}): nerite engines install tensorrt-llm"
            ) from error
        self._thread.start()
        try:
            self._ready.result()
        except Exception as error:  # Whatever the framework raises says why the model cannot be loaded.
            raise _translated(error, "loading model") from error

    def add(self, request: GenerationRequest, listener: Listener) -> None:
        """Take a request up. Raises ``NeriteError``."""
        if not self.is_healthy():
            raise Unavailable("the engine does not run")
        refuse_what_is_lacking(request, self._able)
        refuse_what_is_unknown(request.sampling, _SAMPLING, NAME)
        prompt = request.prompt
        if isinstance(prompt, str):
            tokens = self._model.tokenizer.encode(prompt, add_special_tokens=request.special_tokens)
        else:
            tokens = list(prompt)
        most = self._able.context_length
        if not tokens:
            raise InvalidArgument("the prompt is empty")
        if len(tokens) >= most:
            raise InvalidArgument(
                f"the prompt has {len(tokens)} tokens, and the model a context of {most}: leave out at least "
                f"{len(tokens) - most + 1}, so that there is room for an answer"
            )
        self._coming.append(request.id)
        self._loop.call_soon_threadsafe(self._begin, request, tokens, listener)

    def abort(self, id: str) -> None:
        """End a request, if it runs."""
        self._loop.call_soon_threadsafe(self._cut, id)

    def stats(self) -> EngineStats:
        """Return how it is now."""
        total, free, size = self._blocks
        return EngineStats(
            len(self._running),
            len(self._coming),
            total,
            free if self._running else total,
            size,
            self._able.context_length,
            self._able.most_sequences,
            self._prompt_tokens,
            self._generated_tokens,
            0,
        )

    def capabilities(self) -> Capabilities:
        """Return what it can do."""
        return self._able

    def is_healthy(self) -> bool:
        """Return whether it takes requests."""
        return self._thread.is_alive() and not self._end.is_set()

    def is_ready(self) -> bool:
        """Return whether it can begin with a request at once."""
        return self.is_healthy()

    def stop(self) -> None:
        """Abort what runs, and let go of the model."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    # The engine's thread

    async def _work(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._load()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._stepped(self.stats())
        self._ready.set_result(None)
        looking = asyncio.create_task(self._look())
        await self._end.wait()
        looking.cancel()
        for id in list(self._running):
            self._cut(id)
        await asyncio.gather(*self._tasks, looking, return_exceptions=True)
        self._model.shutdown()

    def _load(self) -> None:
        from tensorrt_llm import LLM
        from tensorrt_llm.llmapi import KvCacheConfig

        given = dict(self._arguments)
        cache = KvCacheConfig(**given.pop("kv_cache"))
        self._model = LLM(kv_cache_config=cache, enable_iter_perf_stats=True, **given)
        told = self._model.args
        length = told.max_seq_len or given.get("max_seq_len") or self._model.tokenizer.tokenizer.model_max_length
        self._able = Capabilities(NAME, int(length), int(told.max_batch_size))

    async def _look(self) -> None:
        """Read the engine's statistics, again and again."""
        while True:
            async for told in self._model.get_stats_async(timeout=_LOOK_AGAIN):
                cache = told.get("kvCacheStats") or {}
                names = ("maxNumBlocks", "freeNumBlocks", "tokensPerBlock")
                total, free, size = (int(cache.get(name, 0)) for name in names)
                self._blocks = (total, free, size)
            await asyncio.sleep(_LOOK_AGAIN)

    def _begin(self, request: GenerationRequest, tokens: list[int], listener: Listener) -> None:
        self._coming.remove(request.id)
        task = asyncio.create_task(self._follow(request, tokens, listener))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, request: GenerationRequest, tokens: list[int], listener: Listener) -> None:
        try:
            result = self._model.generate_async(
                tokens, _sampling(request, self._able.context_length - len(tokens)), streaming=True
            )
        except Exception as error:  # Of this request alone.
            listener.failed(_translated(error, "beginning a request"))
            self._stepped(self.stats())
            return
        self._running[request.id] = result
        self._prompt_tokens += len(tokens)
        listener.admitted(len(tokens))
        try:
            async with asyncio.timeout(_seconds_left(request)):
                async for output in result:
                    self._hand_on(output, listener)
        except TimeoutError:
            result.abort()
            listener.failed(TooLate("the deadline of the request has passed while it ran"))
        except Exception as error:
            listener.failed(_translated(error, "a step of the engine"))
        del self._running[request.id]
        self._stepped(self.stats())

    def _hand_on(self, output: Any, listener: Listener) -> None:
        deltas = []
        for each in output.outputs:
            reason = None if each.finish_reason is None else _REASONS.get(each.finish_reason, FinishReason.ABORT)
            tokens = list(each.token_ids_diff)
            if tokens or each.text_diff or reason is not None:
                self._generated_tokens += len(tokens)
                deltas.append(Delta(each.index, tokens, each.text_diff, (), reason))
        if deltas:
            listener.advanced(deltas)
            self._stepped(self.stats())

    def _cut(self, id: str) -> None:
        if id in self._running:
            self._running[id].abort()


def _seconds_left(request: GenerationRequest) -> float | None:
    if not request.deadline_ns:
        return None
    return max(0.0, (request.deadline_ns - time.monotonic_ns()) / 1e9)


def _sampling(request: GenerationRequest, room: int) -> Any:
    """Return how the tokens of a request are chosen, as TensorRT-LLM has it. Raises what it raises."""
    from tensorrt_llm import SamplingParams

    said = request.sampling
    greedy = said.temperature == 0
    return SamplingParams(
        n=said.n,
        max_tokens=min(said.max_tokens or room, room),
        min_tokens=said.min_tokens or None,
        temperature=None if greedy else said.temperature,
        top_k=1 if greedy else said.top_k or None,
        top_p=None if greedy else said.top_p,
        seed=said.seed,
        presence_penalty=said.presence_penalty or None,
        frequency_penalty=said.frequency_penalty or None,
        repetition_penalty=said.repetition_penalty if said.repetition_penalty != 1 else None,
        stop=list(said.stop) or None,
        stop_token_ids=list(said.stop_token_ids) or None,
        include_stop_str_in_output=said.include_stop_str_in_output,
        ignore_eos=said.ignore_eos,
        skip_special_tokens=said.skip_special_tokens,
    )


def _translated(error: Exception, doing: str) -> NeriteError:
    if isinstance(error, NeriteError):
        return error
    text = f"TensorRT-LLM error in {doing}: {error or type(error).__name__}"
    return InvalidArgument(text) if isinstance(error, (TypeError, ValueError)) else Internal(text)
