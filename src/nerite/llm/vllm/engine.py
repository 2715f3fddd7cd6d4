"""The engine: a thread with a loop, in which vLLM's frontend lives. Its scheduler is in a process of its own.

Nobody waits for a request. What a step has brought is taken from all requests at once, when vLLM tells its statistics:
that it does after each step, in the same loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nerite.core.errors import Internal, NeriteError, Unsupported
from nerite.core.tensor import Array
from nerite.llm import structured_output
from nerite.llm.engine import Capabilities, FinishReason, GenerationRequest, RequestListener, TokenDelta, TokenLogprob
from nerite.llm.loop_engine import LoopEngine
from nerite.llm.request import SamplingParameters, pixels
from nerite.llm.vllm import framework
from nerite.llm.vllm.framework import VllmArguments

# A request inside the engine: what vLLM says of it, in our words.

_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "repetition": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class VllmRequest:
    """One request, from when the engine took it up. For the engine's thread alone."""

    def __init__(
        self,
        request: GenerationRequest,
        listener: RequestListener,
        tokens: list[int],
        images: Sequence[Array],
        sampling: Any,
    ) -> None:
        """``sampling`` are vLLM's parameters, ``tokens`` the prompt, in which images are marks."""
        self.request = request
        self.id = request.id
        self.listener = listener
        self.tokens = tokens
        self.images = images
        self.sampling = sampling
        self.outputs: Any = None
        """Where vLLM puts what comes."""
        self.finished = False

    def taken(self) -> list[TokenDelta]:
        """Return what has come. Raises what vLLM put there instead."""
        output = self.outputs.get_nowait()
        if output is None:
            return []
        self.finished = output.finished
        return [_delta(each) for each in output.outputs]


def _delta(output: Any) -> TokenDelta:
    reason = None
    if output.finish_reason is not None:
        if output.finish_reason not in _REASONS:
            raise Internal(f"vLLM ended the sequence with '{output.finish_reason}'")
        reason = _REASONS[output.finish_reason]
    logprobs = [_logprob(token, told) for token, told in zip(output.token_ids, output.logprobs or (), strict=False)]
    return TokenDelta(output.index, list(output.token_ids), output.text, logprobs, reason)


def _logprob(token: int, told: Mapping[int, Any]) -> TokenLogprob:
    """Return what is told of one place: of the token that was chosen, and of those that were likelier or nearly so."""
    others = [_one(each, about) for each, about in told.items() if each != token]
    chosen = told[token]
    return TokenLogprob(token, chosen.logprob, chosen.decoded_token or "", chosen.rank, others)


def _one(token: int, about: Any) -> TokenLogprob:
    return TokenLogprob(token, about.logprob, about.decoded_token or "", about.rank)


_COUNTED: Final = ("prefix_queries", "prefix_hits", "preemptions", "drafted", "accepted")


class VllmEngine(LoopEngine):
    """vLLM's asynchronous engine."""

    name = "vllm"
    sampling = framework.SAMPLING

    def __init__(self, arguments: VllmArguments) -> None:
        super().__init__()
        self._arguments = arguments
        self._engine: Any = None
        self._adapters: dict[str, Any] = {}
        self._coming: deque[VllmRequest] = deque()
        self._aborts: deque[str] = deque()
        self._running: dict[str, VllmRequest] = {}
        self._busy = (0, 0, 0.0)
        """Requests that run and wait, and the share of the cache that is in use, after the last step."""
        self._totals = dict.fromkeys(_COUNTED, 0)

    def abort(self, id: str) -> None:
        """End a request, if it runs or waits."""
        self._aborts.append(id)
        self._nudge()

    def is_healthy(self) -> bool:
        """Return whether it takes requests."""
        return super().is_healthy() and not self._engine.errored

    def _prepare(self) -> None:
        framework.begin(self._arguments)

    def _take(self, request: GenerationRequest, tokens: list[int], listener: RequestListener) -> None:
        if request.grammar is not None:  # it is compiled where the model steps, without a limit
            structured_output.check_repetitions(self.name, request.grammar)
        try:
            sampling = framework.sampling(request)
        except Exception as error:  # It says what is wrong with the parameters.
            raise framework.translated(error, "reading sampling parameters") from error
        if request.images and request.sampling.truncate_prompt_tokens is not None:
            raise Unsupported("'truncate_prompt_tokens': a prompt with images is taken as a whole")
        shown = pixels(request.images)
        self._coming.append(VllmRequest(request, listener, tokens, shown, sampling))
        self._nudge()

    def _usage(self) -> tuple[int, int, int]:
        # vLLM's own numbers stand still when it does.
        running, waiting, share = self._busy if self._running else (0, 0, 0.0)
        return running, waiting + len(self._coming), round(share * self._blocks[0])

    def _translated(self, error: Exception, doing: str) -> NeriteError:
        return framework.translated(error, doing)

    # The engine's thread

    async def _work(self) -> None:
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            while self._coming:
                await self._begin(self._coming.popleft())
            await self._cut()
        for id in list(self._running):
            self._aborts.append(id)
        await self._cut()

    def _let_go(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    async def _load(self) -> None:
        self._engine = engine = framework.engine(self._arguments, self._step)
        tasks = await engine.get_supported_tasks()
        if "generate" not in tasks:
            raise Unsupported(f"the model generates no text: vLLM would do {', '.join(tasks)} with it")
        self._tokenizer = engine.get_tokenizer()
        config = engine.vllm_config
        self._blocks = (config.cache_config.num_gpu_blocks or 0, config.cache_config.block_size)
        self._adapters = framework.adapters(self._arguments)
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
        )
        # What is compiled for the first request would otherwise be waited for by its caller; so for probabilities.
        said = SamplingParameters(max_tokens=2, ignore_eos=True, logprobs=min(1, self._able.top_logprobs))
        first = framework.sampling(GenerationRequest("", [0], said))
        async for _ in engine.generate(framework.prompt([0]), first, "warm-up"):
            pass
        engine.output_handler.add_done_callback(self._ended)

    def _ended(self, _task: Any) -> None:
        """Tell everybody that vLLM has come to an end, if nobody has asked it to."""
        if self._stopping:
            return
        self._deliver()
        self._given_up("vLLM has failed, and what it said is above")

    async def _begin(self, running: VllmRequest) -> None:
        request = running.request
        try:
            if running.images:
                prompt, length, of_images = await framework.with_images(
                    self._engine, running.tokens, running.images, request.cache_salt
                )
            else:
                prompt, length = framework.prompt(running.tokens, request.cache_salt), len(running.tokens)
                of_images = 0
            running.outputs = await self._engine.add_request(
                running.id,
                prompt,
                running.sampling,
                lora_request=self._adapters.get(request.lora),
                priority=request.priority,
            )
        except Exception as error:  # Of this request alone; or the engine is dead, and says so.
            running.listener.failed(framework.translated(error, "beginning a request"))
            self._stepped(self.stats())
            return
        running.images = ()
        self._running[running.id] = running
        self._prompt_tokens += length
        running.listener.admitted(length, image_tokens=of_images)

    async def _cut(self) -> None:
        """End the requests that are not wanted any more."""
        aborts = []
        while self._aborts:
            aborts.append(self._aborts.popleft())
        if aborts:
            await self._engine.abort(aborts)
            self._deliver()

    def _step(self, scheduler: Any, step: Any) -> None:
        """Take what a step has brought. Called by vLLM in the loop."""
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
        """Hand on what has come, of all requests."""
        for running in list(self._running.values()):
            try:
                deltas = running.taken()
            except Exception as error:  # vLLM gives all of them the reason, when it has died.
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
