"""The engine: sends requests to the pipeline process, and delivers its output to the listeners.

The process runs the pipeline's steps (``stepping``); the engine converts their tokens to text while the next step runs.
A failed step does not say which request caused it, and all further steps would fail, too. So all started requests fail
with the error, the process is replaced, and requests that have not started continue in the new process.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.openvino.graph import translated
from nerite.llm.engine import (
    Capabilities,
    EngineStats,
    GenerationRequest,
    GivenUp,
    RequestListener,
    Stepped,
    kept_of_prompt,
    refuse_what_is_lacking,
    refuse_what_is_unknown,
    tokenizable,
)
from nerite.llm.openvino_genai import framework
from nerite.llm.openvino_genai.grammars import Grammars
from nerite.llm.openvino_genai.messages import (
    Compiled,
    CompileOrder,
    DropOrder,
    GenerationOrder,
    Piece,
    PipelineLoaded,
    PipelineStep,
)
from nerite.llm.openvino_genai.options import PipelineOptions, check_lora
from nerite.llm.openvino_genai.pipeline_process import PipelineProcess
from nerite.llm.openvino_genai.running import ImageTokens, RunningRequest, RunningSequence, StepTexts, read_vocabulary
from nerite.llm.openvino_genai.scoring import PromptScorer, Scores
from nerite.llm.structured_output import EBNF, JSON_SCHEMA, REGEX, Grammar


def order_of(
    request: GenerationRequest,
    numbers: Sequence[int],
    tokenizer: Any,
    options: PipelineOptions,
    able: Capabilities,
    ends: frozenset[int],
) -> tuple[int, GenerationOrder]:
    """Return a prompt's number of tokens without images, and the order for the process. Raises ``NeriteError``."""
    length, prompt = _prompt(request, tokenizer, options, able)
    most = able.context_length
    if not length:
        raise InvalidArgument("the prompt is empty")
    if length >= most:
        raise InvalidArgument(
            f"the prompt has {length} tokens, but the model's context is {most}: remove at least "
            f"{length - most + 1} to leave room for an answer"
        )
    sampling, grammar, room = request.sampling, request.grammar, most - length
    form = None if grammar is None else framework.structured(grammar)
    try:
        framework.generation(options, sampling, 0, room, ends, form)
    except RuntimeError as error:
        raise InvalidArgument(translated(error, "reading sampling parameters").message) from error
    order = GenerationOrder(numbers, prompt, request.special_tokens, sampling, room, most * options.sees, ends, grammar)
    return length, order


def _prompt(
    request: GenerationRequest, tokenizer: Any, options: PipelineOptions, able: Capabilities
) -> tuple[int, Array | tuple[str, Sequence[Array]]]:
    prompt = request.prompt
    kept = kept_of_prompt(request.sampling, able.context_length)
    if isinstance(prompt, str):
        text = tokenizable(prompt, kept, able.context_length, partial(_count, tokenizer))
        encoded = tokenizer.encode(text, add_special_tokens=request.special_tokens)
        tokens = np.array(encoded.input_ids.data, np.int64)
    else:
        tokens = np.array([prompt], np.int64)
    length = int(tokens.shape[1])
    cut = request.sampling.truncate_prompt_tokens
    if options.sees:
        if cut is not None or not isinstance(prompt, str):
            what = "tokens" if cut is None else "'truncate_prompt_tokens'"
            raise Unsupported(f"{what}: a model that takes images needs its prompt as text, and cannot truncate it")
        return length, (prompt, request.images)
    if kept is not None and kept < length:
        length, tokens = kept, np.ascontiguousarray(tokens[:, -kept:])
    return length, tokens


def _count(tokenizer: Any, text: str) -> int:
    """Return the number of tokens of a text, without special ones."""
    return int(tokenizer.encode(text, add_special_tokens=False).input_ids.data.size)


_log = logging.getLogger("nerite.llm")

NAME: Final = "openvino_genai"
_GRAMMARS: Final = frozenset({JSON_SCHEMA, REGEX, EBNF})
_BLOCK: Final = 32
"""Tokens per block of the KV cache on a CPU."""


class OpenVinoGenAiEngine:
    """Engine with OpenVINO GenAI's continuous batching."""

    def __init__(self, options: PipelineOptions) -> None:
        self._options = options
        self.process: PipelineProcess
        self._tokenizer: Any = None
        self.grammars: Grammars
        self._decoder: Any = None
        self._texts: StepTexts
        self._scorer: PromptScorer
        self._vocabulary = 0
        """Number of tokens that the model knows; 0 until it was read."""
        self._able: Capabilities
        self._ends: frozenset[int] = frozenset()
        """Tokens by which the model ends its answer."""
        self._blocks = 0
        """Blocks of the KV cache."""
        self._lock = threading.Lock()
        """Guards the following attributes, and ``process``."""
        self._running: dict[str, RunningRequest] = {}
        """Requests that were sent to the process."""
        self._untried: dict[str, RunningRequest] = {}
        """Requests whose grammar is being compiled."""
        self._held: dict[str, RunningRequest] = {}
        """Requests that wait for a new process, because this one has no room for more grammars."""
        self._wrong: deque[tuple[RunningRequest, NeriteError]] = deque()
        """Requests whose grammar turned out to be invalid."""
        self._aborts: deque[str] = deque()
        self._ready = self._stopping = self._compiling = False
        self._compiled: queue.SimpleQueue[Compiled | None] = queue.SimpleQueue()
        """Results of compilations; None if the process is gone."""
        self._sequences = itertools.count(1)
        """Numbers of sequences; a duplicate would break the pipeline."""
        self._open: dict[int, RunningSequence] = {}
        """Unfinished sequences in the process, by their numbers."""
        self._stepped: Stepped
        self._given_up: GivenUp
        self._usage = (0, 0)
        """Sequences in the last step, and blocks that it used."""
        self._prompt_tokens = self._failures = 0
        self._image_tokens = ImageTokens()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, stepped: Stepped, given_up: GivenUp) -> None:
        """Load the model, and generate a token with it. Raises ``NeriteError``."""
        self._stepped, self._given_up = stepped, given_up
        adapter = self._options.adapter
        self.process = PipelineProcess(self._options)
        try:
            if adapter is not None:
                check_lora(adapter, framework.layers(self._options.model))
            self._tokenizer = framework.tokenizer(self._options.directory)
            self._loaded(self.process.loaded())
        except Exception as error:  # any error of the framework explains why the model cannot be loaded
            self.process.end()
            raise translated(error, "loading model") from error
        self._decoder = read_vocabulary(self._options.directory) or self._tokenizer
        self._texts = StepTexts(self._decoder, self._options.guesses)
        self._scorer = PromptScorer(self._options, self.detokenize)
        self.grammars = Grammars(self._options, self._compile)
        length, capacity = self._options.context_length, self._blocks * _BLOCK
        self._able = Capabilities(
            NAME,
            min(length or capacity, capacity),
            self._options.max_sequences,
            # The state of a grammar cannot be rolled back when speculative tokens are rejected.
            grammars=frozenset() if self._options.speculates else _GRAMMARS,
            images=self._options.sees,
            adapters=frozenset() if adapter is None else frozenset({adapter.name}),
        )
        stepped(self.stats())
        self._thread.start()

    def _loaded(self, loaded: PipelineLoaded) -> None:
        self._blocks, self._ends = loaded
        self._ready = True

    def add(self, request: GenerationRequest, listener: RequestListener) -> None:
        """Add a request. Raises ``NeriteError``."""
        if not self.is_healthy():
            raise Unavailable("the engine is not running")
        refuse_what_is_lacking(request, self._able)
        refuse_what_is_unknown(request.sampling, framework.SAMPLING, NAME)
        self._check_tokens(request)
        numbers = [next(self._sequences) for _ in range(request.sampling.n)]
        length, order = order_of(request, numbers, self._tokenizer, self._options, self._able, self._ends)
        running = RunningRequest(request, listener, length, order, self._image_tokens)
        known = request.grammar is None or self.grammars.known(request.grammar, self._ends_of(request))
        known = known and request.sampling.prompt_logprobs is None
        with self._lock:
            if not self.is_healthy():
                raise Unavailable("the engine is not running")
            if known:
                self._send(running)
                return
            self._untried[running.id] = running
        self._prepare_first(running)

    def tokenize(self, request: GenerationRequest) -> Sequence[int]:
        """Return the tokens of a prompt. Raises ``NeriteError``."""
        prompt = request.prompt
        if not isinstance(prompt, str):
            self._check_tokens(request)
            return prompt
        most = self._able.context_length
        kept = kept_of_prompt(request.sampling, most)
        text = tokenizable(prompt, kept, most, partial(_count, self._tokenizer))
        encoded = self._tokenizer.encode(text, add_special_tokens=request.special_tokens)
        found = np.array(encoded.input_ids.data, np.int64).reshape(-1)
        if found.size > most:
            raise InvalidArgument(f"the prompt has {found.size} tokens, but the model's context is {most}")
        tokens: list[int] = found.tolist()
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Raises ``InvalidArgument`` for tokens that the model does not know."""
        self._check_known(tokens)
        return str(self._decoder.decode(list(tokens), skip_special_tokens=False)) if tokens else ""

    def _check_tokens(self, request: GenerationRequest) -> None:
        """Raise ``NeriteError`` for tokens that the model does not know, and for scores that cannot be had."""
        if not isinstance(request.prompt, str):
            self._check_known(request.prompt)
        if request.sampling.prompt_logprobs is not None:
            if self._options.sees:
                raise Unsupported("'prompt_logprobs' is not supported for models that take images")
            if request.grammar is not None:
                raise InvalidArgument("'prompt_logprobs' cannot be combined with structured output")

    def _check_known(self, tokens: Sequence[int]) -> None:
        if not self._vocabulary and tokens:
            self._vocabulary = framework.vocabulary_size(self._options)
        wrong = max(tokens, default=-1)
        if wrong >= self._vocabulary:  # the framework would read out of bounds
            raise InvalidArgument(
                f"'prompt_token_ids' has {wrong}, but the vocabulary has {self._vocabulary} tokens, from 0"
            )

    def _ends_of(self, request: GenerationRequest) -> set[int]:
        """Return the tokens that end the answer to a request."""
        return {*request.sampling.stop_token_ids, *self._ends}

    def _prepare_first(self, running: RunningRequest) -> None:
        """Have the grammar of a request compiled, or the log probabilities of its prompt computed."""
        request = running.request
        if request.grammar is None:
            count, prompt = request.sampling.prompt_logprobs, running.order.prompt
            assert count is not None and not isinstance(prompt, tuple)

            def scored(scores: Scores, wrong: NeriteError | None) -> None:
                running.prompt_logprobs = scores
                self._tried(running, wrong)

            self._scorer.score(prompt, count, scored)
            return
        self.grammars.find_out(request.grammar, self._ends_of(request), lambda wrong: self._tried(running, wrong))

    def _send(self, running: RunningRequest) -> None:
        """Send a request to the process, or hold it until a process has room for grammars. The lock must be held."""
        if self.grammars.full:
            self._held[running.id] = running
            return
        self._running[running.id] = running
        self._open |= running.open
        self.process.send(running.order)

    def _tried(self, running: RunningRequest, wrong: NeriteError | None) -> None:
        """Continue with a request whose grammar was compiled, unless it was aborted."""
        with self._lock:
            if running.id not in self._aborts and self._untried.pop(running.id, None) is running:
                if wrong is None:
                    self._send(running)
                else:
                    self._wrong.append((running, wrong))
            # Causes a ``PipelineStep``, so that the engine's thread handles the change, also if the grammars are full.
            self.process.send(DropOrder(()))

    def _compile(self, grammar: Grammar, ends: Collection[int], vocabulary: int) -> str:
        """Compile a grammar in the process; return its error. For one thread at a time."""
        with self._lock:
            if not self.is_healthy():
                raise Unavailable("the engine is not running")
            self._compiling = True
            self.process.send(CompileOrder(grammar, frozenset(ends), vocabulary))
        compiled = self._compiled.get()
        if compiled is None:
            raise Internal("the engine failed during the compilation")
        return compiled.wrong

    def _has_compiled(self, compiled: Compiled | None) -> None:
        if self._compiling:
            self._compiling = False
            self._compiled.put(compiled)

    def abort(self, id: str) -> None:
        """Abort a request if it runs or waits."""
        with self._lock:
            running = self._running.get(id)
            self._aborts.append(id)
            self.process.send(DropOrder(running.order.numbers if running is not None else ()))

    def stats(self) -> EngineStats:
        """Return the current state."""
        sequences = sum(len(each.open) for each in list(self._running.values()))
        aside = sum(len(each.open) for each in [*self._untried.values(), *self._held.values()])
        scheduled, used = self._usage
        running = min(scheduled, sequences)
        return EngineStats(
            running,
            sequences - running + aside,
            self._blocks,
            self._blocks - used,
            _BLOCK,
            self._able.context_length,
            self._able.max_sequences,
            self._prompt_tokens,
            self._texts.generated_tokens,
            self._failures,
            # With prompt lookup the number of proposed tokens is unknown.
            drafted=None if self._options.draft is None else self._texts.drafted,
            accepted=self._texts.accepted if self._options.speculates else None,
        )

    def capabilities(self) -> Capabilities:
        """Return the features of the engine."""
        return self._able

    def is_healthy(self) -> bool:
        """Return whether the engine accepts requests."""
        return self._thread.is_alive() and not self._stopping

    def is_ready(self) -> bool:
        """Return whether the pipeline is loaded."""
        return self.is_healthy() and self._ready

    def stop(self) -> None:
        """Abort all requests and release the model."""
        with self._lock:
            self._stopping = True
            self.process.kill()
        if self._thread.ident is not None:
            self._thread.join()
            self.grammars.close()
            self._scorer.close()
        self._tokenizer = None

    # The engine's thread

    def _run(self) -> None:
        while not self._stopping:
            message = self.process.next()
            failure = None if message is not None else ""
            if isinstance(message, Compiled):
                self._has_compiled(message)
            elif message is not None:
                failure = self._try_handle(message)
            if failure is not None:
                self._restart(failure)
            elif self.grammars.full and not self._running:
                self._forget_grammars()
        self._finish()

    def _try_handle(self, step: PipelineStep) -> str | None:
        """Handle the results of a step; return why the process must be replaced, or None."""
        try:
            self._handle(step)
        except Exception as error:  # a bug; restart, so that no caller waits forever
            _log.exception("'%s': the results of a step could not be delivered", self._options.name)
            return f"{type(error).__name__}: {error}"
        return step.failure or None

    def _handle(self, step: PipelineStep) -> None:
        """Deliver the results of a step."""
        wrong, aborts = self._take_changes()
        for running, error in wrong:
            running.fail(error)
        for number in step.begun:
            sequence = self._open.get(number)
            if sequence is not None and not sequence.of.begun:
                sequence.of.begin()
                self._prompt_tokens += sequence.of.prompt_tokens
        for number, error in step.refused:
            sequence = self._open.get(number)
            if sequence is not None:
                self._forget(sequence.of)
                sequence.of.fail(error)
        self._end_aborted(aborts)
        self._deliver(step.pieces)
        self._usage = step.scheduled, step.blocks
        self.process.allow_step()
        self._stepped(replace(self.stats(), step_began_ns=step.began_ns, step_ended_ns=step.ended_ns))

    def _take_changes(self) -> tuple[Sequence[tuple[RunningRequest, NeriteError]], Sequence[str]]:
        """Take the requests with invalid grammars, and the ids of aborted requests."""
        if not (self._wrong or self._aborts):
            return (), ()
        with self._lock:
            wrong, aborts = list(self._wrong), list(self._aborts)
            self._wrong.clear()
            self._aborts.clear()
            # Aborted requests neither wait nor need the result of their grammar.
            for aside in (self._untried, self._held):
                self._running |= {id: aside.pop(id) for id in aborts if id in aside}
        return wrong, aborts

    def _forget(self, running: RunningRequest, *, drop: bool = True) -> None:
        """Remove a request, and with ``drop`` cancel it in the process."""
        self._running.pop(running.id, None)
        for number in running.order.numbers:
            self._open.pop(number, None)
        if drop:
            self.process.send(DropOrder(running.order.numbers))

    def _end_aborted(self, aborts: Iterable[str]) -> None:
        """End the aborted requests."""
        for id in aborts:
            running = self._running.get(id)
            if running is not None:
                self._forget(running, drop=False)  # ``abort`` has already cancelled it in the process
                running.abort()

    def _deliver(self, pieces: Iterable[Piece]) -> None:
        """Deliver the new output of requests that are still running."""
        new, cut = self._texts.of(pieces, self._open)
        if cut:
            self.process.send(DropOrder(cut))
        for running, deltas in new.items():
            if not running.open:
                self._running.pop(running.id, None)
            running.listener.advanced(deltas)

    def _restart(self, reason: str) -> None:
        """Fail the started requests and replace the process, unless the engine is stopping."""
        how = self.process.end()
        if self._stopping:
            return
        reason = reason or f"its process {how}"
        _log.error("'%s': %s; the engine restarts", self._options.name, reason)
        self._failures += 1
        self._end_aborted(self._take_changes()[1])
        for running in list(self._running.values()):
            if running.begun:
                self._forget(running, drop=False)
                running.fail(Internal(f"The engine failed while it ran this request: {reason}"))
        self._replace_process()

    def _forget_grammars(self) -> None:
        """Replace the process to free the memory of compiled grammars."""
        _log.info("'%s': compiled grammars reached their memory limit; restarting the pipeline", self._options.name)
        self.process.end()
        self._replace_process()

    def _replace_process(self) -> None:
        """Start a new process, and send it the requests that have not started."""
        self._usage = (0, 0)
        self._ready = False
        self._stepped(self.stats())
        with self._lock:
            self._has_compiled(None)  # under the lock, so that further grammars are compiled by the new process
            if self._stopping:
                return
            self.process = PipelineProcess(self._options)
            self.grammars.forget()
            left = [*self._running.values(), *self._held.values()]
            self._running.clear()
            self._held.clear()
            again = [running for running in left if not self._is_ready_to_run(running)]
            self._untried |= {running.id: running for running in again}
            for running in left:
                if running not in again:
                    self._send(running)
        for running in again:
            self._prepare_first(running)
        try:
            self._loaded(self.process.loaded())
        except NeriteError as error:  # the engine is unhealthy from now on
            with self._lock:
                stopped, self._stopping = self._stopping, True
            if not stopped:
                why = f"the engine cannot restart: {error.message}"
                for running in self._take_all():
                    running.fail(Unavailable(f"The engine has failed: {why}"))
                self._stepped(self.stats())
                self._given_up(f"'{self._options.name}': {why}")

    @staticmethod
    def _is_ready_to_run(running: RunningRequest) -> bool:
        """Return whether a new process can run a request at once."""
        scored = running.request.sampling.prompt_logprobs is None or bool(running.prompt_logprobs)
        return running.request.grammar is None and scored

    def _take_all(self) -> Sequence[RunningRequest]:
        """Remove and return all requests."""
        with self._lock:
            everyone = [*self._running.values(), *self._untried.values(), *self._held.values()]
            everyone += [running for running, _ in self._wrong]
            self._running.clear()
            self._untried.clear()
            self._held.clear()
            self._wrong.clear()
            self._open.clear()
        return everyone

    def _finish(self) -> None:
        """Abort all requests at the end of the thread."""
        self.process.end()
        self._has_compiled(None)
        self._usage = (0, 0)
        for running in self._take_all():
            running.abort()
        self._stepped(self.stats())
