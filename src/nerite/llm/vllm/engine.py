"""The vLLM engine: runs vLLM's frontend in the event loop of a thread; its scheduler runs in another process.

No task waits for a request. Instead the output of all requests is collected at once when vLLM reports its statistics,
which it does after each step, in the same loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotFound, Unavailable, Unsupported
from nerite.core.tensor import Array
from nerite.llm import structured_output
from nerite.llm.engine import (
    Capabilities,
    FinishReason,
    GenerationRequest,
    LoopEngine,
    RequestListener,
    TokenDelta,
    TokenLogprob,
)
from nerite.llm.sampling_parameters import SamplingParameters
from nerite.llm.vllm import framework
from nerite.llm.vllm.framework import VllmArguments

_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


_ADAPTER_SECONDS: Final = 60
"""Time limit for loading an adapter."""
_SLEEP_SECONDS: Final = 300
"""Time limit for moving the weights between the memory of the GPUs and that of the host."""
_OFFLOADED: Final = 1
"""Sleep level of vLLM that keeps the weights in the memory of the host; the KV cache is forgotten."""


class VllmRequest:
    """A request in the engine, and its vLLM output. For the engine's thread only."""

    def __init__(
        self,
        request: GenerationRequest,
        listener: RequestListener,
        tokens: list[int],
        images: Sequence[Array],
        sampling: Any,
    ) -> None:
        """``sampling`` are vLLM's parameters; ``tokens`` is the prompt, in which images are placeholders."""
        self.request = request
        self.id = request.id
        self.listener = listener
        self.tokens = tokens
        self.images = images
        self.sampling = sampling
        self.outputs: Any = None
        """vLLM's collector of the request's output."""
        self.finished = False
        self.fresh = True
        """Whether there was no output yet."""

    def taken(self, decode: Callable[[Sequence[int]], str]) -> list[TokenDelta]:
        """Return the new output. ``decode`` returns the text of tokens. Raises the error that vLLM stored instead."""
        output = self.outputs.get_nowait()
        if output is None:
            return []
        self.finished = output.finished
        deltas = [_delta(each) for each in output.outputs]
        if deltas and self.fresh:
            self.fresh = False
            deltas[0] = replace(
                deltas[0],
                prompt_logprobs=_scores(output, decode) if self.request.sampling.prompt_logprobs is not None else (),
                cached_tokens=output.num_cached_tokens,
            )
        return deltas


def _scores(output: Any, decode: Callable[[Sequence[int]], str]) -> list[TokenLogprob]:
    """Return the log probabilities of a prompt's tokens; the first has none."""
    tokens = output.prompt_token_ids
    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=False)
    return [TokenLogprob(tokens[0], math.nan, decode(tokens[:1])), *(_logprob(token, each) for token, each in pairs)]


def _delta(output: Any) -> TokenDelta:
    reason = None
    if output.finish_reason is not None:
        if output.finish_reason not in _REASONS:
            raise Internal(f"vLLM ended the sequence with '{output.finish_reason}'")
        reason = _REASONS[output.finish_reason]
    logprobs = [_logprob(token, each) for token, each in zip(output.token_ids, output.logprobs or (), strict=False)]
    return TokenDelta(output.index, list(output.token_ids), output.text, logprobs, reason)


def _logprob(token: int, candidates: Mapping[int, Any]) -> TokenLogprob:
    """Return the log probabilities of one position: of the chosen token and of the alternatives that vLLM reports."""
    others = [_one(each, about) for each, about in candidates.items() if each != token]
    chosen = candidates[token]
    return TokenLogprob(token, chosen.logprob, chosen.decoded_token or "", chosen.rank, others)


def _one(token: int, about: Any) -> TokenLogprob:
    return TokenLogprob(token, about.logprob, about.decoded_token or "", about.rank)


_COUNTED: Final = ("prefix_queries", "prefix_hits", "preemptions", "drafted", "accepted")


class VllmEngine(LoopEngine):
    """Engine with vLLM's ``AsyncLLM``."""

    name = "vllm"
    sampling = framework.SAMPLING

    def __init__(self, arguments: VllmArguments) -> None:
        super().__init__()
        self._arguments = arguments
        self._engine: Any = None
        self._adapters: dict[str, Any] = {}
        self._last_adapter = 0
        """Number of the last adapter: vLLM knows adapters by their numbers."""
        self._new: deque[VllmRequest] = deque()
        self._aborts: deque[str] = deque()
        self._running: dict[str, VllmRequest] = {}
        self._busy = (0, 0, 0.0)
        """Running requests, waiting requests and the used share of the KV cache after the last step."""
        self._totals = dict.fromkeys(_COUNTED, 0)

    def abort(self, id: str) -> None:
        """Abort a request if it runs or waits."""
        self._aborts.append(id)
        self._nudge()

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter while requests run. Raises ``NeriteError``."""
        if not self._arguments.engine.get("enable_lora"):
            raise Unsupported(
                'the model was loaded without LoRA: add "enable_lora": true to its model.json, and load it again'
            )
        self._call(self._load_adapter(name, path), "loading the adapter", _ADAPTER_SECONDS)

    def unload_adapter(self, name: str) -> None:
        """Refuse requests for a LoRA adapter from now on; those that run go on with it. Raises ``NeriteError``."""
        self._call(self._unload_adapter(name), "unloading the adapter", _ADAPTER_SECONDS)

    def sleep(self) -> None:
        """Have vLLM move the weights to the memory of the host, and forget the KV cache. Raises ``NeriteError``."""
        if not self._able.sleeps:
            raise Unsupported('the model was loaded without "enable_sleep_mode": true in its model.json')
        self._call(self._engine.sleep(level=_OFFLOADED), "falling asleep", _SLEEP_SECONDS)

    def wake(self) -> None:
        """Have vLLM move the weights back to the GPUs. Raises ``NeriteError``."""
        self._call(self._engine.wake_up(), "waking up", _SLEEP_SECONDS)

    def _call(self, change: Coroutine[Any, Any, None], doing: str, seconds: float) -> None:
        """Have the engine's thread make a change, and wait for it."""
        if not self.is_healthy():
            change.close()
            raise Unavailable("the engine is not running")
        try:
            asyncio.run_coroutine_threadsafe(change, self._loop).result(seconds)
        except NeriteError:
            raise
        except TimeoutError:
            raise Unavailable(f"the engine has not ended {doing} within {seconds:g} seconds") from None
        except Exception as error:  # it explains what is wrong, for example with an adapter
            raise framework.translated(error, doing) from error

    def is_healthy(self) -> bool:
        """Return whether the engine accepts requests."""
        return super().is_healthy() and not self._engine.errored

    def _prepare(self) -> None:
        framework.begin(self._arguments)

    def _take(self, request: GenerationRequest, tokens: list[int], listener: RequestListener) -> None:
        if request.grammar is not None:  # vLLM compiles it without limits in the process that runs the model
            structured_output.check_repetitions(self.name, request.grammar)
        try:
            sampling = framework.sampling(request)
        except Exception as error:  # it explains which parameter is invalid
            raise framework.translated(error, "reading sampling parameters") from error
        if request.images and request.sampling.truncate_prompt_tokens is not None:
            raise Unsupported("'truncate_prompt_tokens': a prompt with images cannot be truncated")
        self._new.append(VllmRequest(request, listener, tokens, request.images, sampling))
        self._nudge()

    def _usage(self) -> tuple[int, int, int]:
        # vLLM does not update its numbers while it is idle.
        running, waiting, share = self._busy if self._running else (0, 0, 0.0)
        return running, waiting + len(self._new), round(share * self._blocks[0])

    def _translated(self, error: Exception, doing: str) -> NeriteError:
        return framework.translated(error, doing)

    # The engine's thread

    async def _work(self) -> None:
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            while self._new:
                await self._start_request(self._new.popleft())
            await self._abort_cancelled()
        for id in list(self._running):
            self._aborts.append(id)
        await self._abort_cancelled()

    def _release(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    async def _load(self) -> None:
        self._engine = engine = framework.engine(self._arguments, self._step)
        tasks = await engine.get_supported_tasks()
        if "generate" not in tasks:
            raise Unsupported(f"the model generates no text: vLLM supports {', '.join(tasks)} for it")
        self._tokenizer = engine.get_tokenizer()
        config = engine.vllm_config
        self._blocks = (config.cache_config.num_gpu_blocks or 0, config.cache_config.block_size)
        self._adapters = framework.adapters(self._arguments)
        self._last_adapter = len(self._adapters)
        for adapter in self._adapters.values():
            await engine.add_lora(adapter)
        self._able = Capabilities(
            self.name,
            config.model_config.max_model_len,
            config.scheduler_config.max_num_seqs,
            top_logprobs=config.model_config.max_logprobs,
            grammars=framework.GRAMMARS,
            images=framework.sees(engine),
            adapters=frozenset(self._adapters),
            priorities=config.scheduler_config.policy == "priority",
            sleeps=bool(self._arguments.engine.get("enable_sleep_mode")),
        )
        # Warm-up: otherwise the first request would wait for compilation. With logprobs, which need code of their own.
        wanted = SamplingParameters(max_tokens=2, ignore_eos=True, logprobs=min(1, self._able.top_logprobs))
        first = framework.sampling(GenerationRequest("", [0], wanted))
        async for _ in engine.generate(framework.prompt([0]), first, "warm-up"):
            pass
        engine.output_handler.add_done_callback(self._ended)

    async def _load_adapter(self, name: str, path: str) -> None:
        if name in self._adapters:
            raise InvalidArgument(f"the LoRA adapter '{name}' has already been loaded")
        self._last_adapter += 1
        adapter = framework.adapter(name, self._last_adapter, path)
        await self._engine.add_lora(adapter)
        self._adapters[name] = adapter
        self._able = replace(self._able, adapters=frozenset(self._adapters))

    async def _unload_adapter(self, name: str) -> None:
        adapter = self._adapters.pop(name, None)
        if adapter is None:
            raise NotFound(f"the LoRA adapter '{name}' cannot be found")
        self._able = replace(self._able, adapters=frozenset(self._adapters))
        # Otherwise it goes when the engine needs room for another.
        if all(running.request.lora != name for running in self._running.values()):
            await self._engine.remove_lora(adapter.lora_int_id)

    def _ended(self, _task: Any) -> None:
        """Report that vLLM has terminated, unless it was stopped."""
        if self._stopping:
            return
        self._deliver()
        self._given_up("vLLM has failed; its messages are above")

    async def _start_request(self, running: VllmRequest) -> None:
        request = running.request
        try:
            if running.images:
                prompt, length, image_tokens = await framework.with_images(
                    self._engine, running.tokens, running.images, request.cache_salt
                )
            else:
                prompt, length = framework.prompt(running.tokens, request.cache_salt), len(running.tokens)
                image_tokens = 0
            running.outputs = await self._engine.add_request(
                running.id,
                prompt,
                running.sampling,
                lora_request=self._adapters.get(request.lora),
                priority=request.priority,
            )
        except Exception as error:  # affects only this request, unless the engine has failed
            running.listener.failed(framework.translated(error, "starting a request"))
            self._stepped(self.stats())
            return
        running.images = ()
        self._running[running.id] = running
        self._prompt_tokens += length
        running.listener.admitted(length, image_tokens=image_tokens)

    async def _abort_cancelled(self) -> None:
        """Abort the cancelled requests."""
        aborts = []
        while self._aborts:
            aborts.append(self._aborts.popleft())
        if aborts:
            await self._engine.abort(aborts)
            self._deliver()

    def _step(self, scheduler: Any, step: Any) -> None:
        """Collect the results of a step. Called by vLLM in the loop."""
        if scheduler is not None:
            self._busy = (scheduler.num_running_reqs, scheduler.num_waiting_reqs, scheduler.kv_cache_usage)
            self._totals["prefix_queries"] += scheduler.prefix_cache_stats.queries
            self._totals["prefix_hits"] += scheduler.prefix_cache_stats.hits
            if scheduler.spec_decoding_stats is not None:
                self._totals["drafted"] += scheduler.spec_decoding_stats.num_draft_tokens
                self._totals["accepted"] += scheduler.spec_decoding_stats.num_accepted_tokens
        if step is not None:
            self._totals["preemptions"] += step.num_preempted_reqs
        self._deliver()

    def _deliver(self) -> None:
        """Deliver the new output of all requests to their listeners."""
        for running in list(self._running.values()):
            try:
                deltas = running.taken(self.detokenize)
            except Exception as error:  # when vLLM fails, it stores the reason in every request
                self._failed(running, framework.translated(error, "a step of the engine"))
                continue
            if deltas:
                self._generated_tokens += sum(len(delta.tokens) for delta in deltas)
                if running.finished:
                    del self._running[running.id]
                running.listener.advanced(deltas)
        if self._ready.done():
            self._stepped(self.stats())

    def _failed(self, running: VllmRequest, error: NeriteError) -> None:
        del self._running[running.id]
        running.listener.failed(error)
