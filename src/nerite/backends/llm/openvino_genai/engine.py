"""The engine: a thread that steps a pipeline as long as there is something to generate.

Only that thread touches the pipeline; requests and aborts are left for it, and are taken up between two steps. A step
that fails says nothing of whose fault it was, and the ones after it fail, too. So what runs then fails with its reason,
and the pipeline is made anew; what has not begun goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from nerite.backends.llm import images
from nerite.backends.llm.engine import (
    Capabilities,
    Delta,
    EngineStats,
    GenerationRequest,
    GivenUp,
    Listener,
    Stepped,
    kept_of_prompt,
    refuse_what_is_lacking,
)
from nerite.backends.llm.openvino_genai import framework, lora
from nerite.backends.llm.openvino_genai.grammars import Grammars
from nerite.backends.llm.openvino_genai.options import Options
from nerite.backends.llm.openvino_genai.running import Running, decoded
from nerite.backends.llm.structured import EBNF, JSON_SCHEMA, REGEX
from nerite.backends.openvino.framework import openvino, translated
from nerite.core.errors import Internal, InvalidArgument, NeriteError, TooLate, Unavailable, Unsupported

_log = logging.getLogger("nerite.backends.llm")

NAME: Final = "openvino_genai"
_GRAMMARS: Final = frozenset({JSON_SCHEMA, REGEX, EBNF})
_BLOCK: Final = 32
"""Tokens in a block of KV, on a CPU."""


class OpenVinoGenAiEngine:
    """OpenVINO GenAI's continuous batching."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pipeline: Any = None
        self._tokenizer: Any = None
        self._grammars: Grammars
        self._ends: frozenset[int] = frozenset()
        """The tokens by which the model says that it is done."""
        self._able: Capabilities
        self._wake = threading.Condition()
        self._coming: deque[Running] = deque()
        self._aborts: deque[str] = deque()
        self._untried: dict[str, Running] = {}
        """Those whose grammar is being tried."""
        self._wrong: deque[tuple[Running, NeriteError]] = deque()
        """Those whose grammar was, and is none."""
        self._stopping = False
        self._running: dict[str, Running] = {}
        self._sequences = 0
        """The number of the next sequence: two of one number would break the pipeline."""
        self._stepped: Stepped
        self._given_up: GivenUp
        self._blocks = 0
        """Of the KV cache."""
        self._usage = (0, 0)
        """Sequences in the last step, and the blocks that were in use then."""
        self._prompt_tokens = self._generated_tokens = self._failures = 0
        self._drafted = self._accepted = 0
        """Tokens that were guessed, and those of them that were right."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, stepped: Stepped, given_up: GivenUp) -> None:
        """Load the model, and generate a token with it. Raises ``NeriteError``."""
        self._stepped, self._given_up = stepped, given_up
        adapter = self._options.adapter
        try:
            if adapter is not None:
                lora.check(adapter, framework.layers(self._options.model))
            self._tokenizer = framework.tokenizer(self._options.directory)
            self._pipeline = framework.pipeline(self._options, self._tokenizer)
            self._grammars = Grammars(self._options, self._tokenizer)
            own = self._pipeline.get_config()
            ends = {own.eos_token_id, self._tokenizer.get_eos_token_id(), *own.stop_token_ids}
            self._ends = frozenset(end for end in ends if end >= 0)
            self._blocks = self._capacity()
        except Exception as error:  # Whatever the framework raises says why the model cannot be loaded.
            raise translated(error, "loading model") from error
        length, capacity = self._options.context_length, self._blocks * _BLOCK
        self._able = Capabilities(
            NAME,
            min(length or capacity, capacity),
            self._options.most_sequences,
            # A guess that is not taken cannot be taken back from a grammar.
            grammars=frozenset() if self._options.speculates else _GRAMMARS,
            images=self._options.sees,
            adapters=frozenset() if adapter is None else frozenset({adapter.name}),
        )
        stepped(self.stats())
        self._thread.start()

    def add(self, request: GenerationRequest, listener: Listener) -> None:
        """Take a request up. Raises ``NeriteError``."""
        if not self.is_healthy():
            raise Unavailable("the engine does not run")
        refuse_what_is_lacking(request, self._able)
        length, prompt = self._prompt(request)
        most = self._able.context_length
        if not length:
            raise InvalidArgument("the prompt is empty")
        if length >= most:
            raise InvalidArgument(
                f"the prompt has {length} tokens, and the model a context of {most}: leave out at least "
                f"{length - most + 1}, so that there is room for an answer"
            )
        form = None
        if request.grammar is not None:
            form = framework.structured(request.grammar)
        try:
            configs = [
                framework.generation(self._options, request.sampling, index, most - length, self._ends, form)
                for index in range(request.sampling.n)
            ]
        except RuntimeError as error:
            raise InvalidArgument(translated(error, "reading sampling parameters").message) from error
        if self._options.sees:  # how many tokens images are is known when the pipeline has encoded them
            for config in configs:
                config.max_length = most
        running = Running(request, listener, length, prompt, configs)
        ends = {*request.sampling.stop_token_ids, *self._ends}
        known = request.grammar is None or self._grammars.known(request.grammar, ends)
        with self._wake:
            if not self.is_healthy():
                raise Unavailable("the engine does not run")
            if known:
                self._coming.append(running)
                self._wake.notify()
                return
            self._untried[running.id] = running
        assert request.grammar is not None
        self._grammars.find_out(request.grammar, ends, lambda wrong: self._tried(running, wrong))

    def _tried(self, running: Running, wrong: NeriteError | None) -> None:
        """Leave a request whose grammar was tried for the engine's thread, if somebody still wants it."""
        with self._wake:
            if self._untried.pop(running.id, None) is not running:
                return
            if wrong is None:
                self._coming.append(running)
            else:
                self._wrong.append((running, wrong))
            self._wake.notify()

    def _prompt(self, request: GenerationRequest) -> tuple[int, Sequence[Any]]:
        """Return how many tokens a prompt has, without those of its images, and the prompt for the pipeline."""
        prompt = request.prompt
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt, add_special_tokens=request.special_tokens).input_ids
        else:
            tokens = openvino().Tensor(np.array([prompt], np.int64))
        length = int(tokens.shape[1])
        cut = request.sampling.truncate_prompt_tokens
        if self._options.sees:
            if cut is not None or not isinstance(prompt, str):
                what = "tokens" if cut is None else "'truncate_prompt_tokens'"
                raise Unsupported(f"{what}: a model that takes images takes its prompt as text, and the whole of it")
            return length, (prompt, [openvino().Tensor(image) for image in images.pixels(request.images)])
        kept = kept_of_prompt(request.sampling, self._able.context_length)
        if kept is not None and kept < length:
            length, tokens = kept, openvino().Tensor(np.ascontiguousarray(tokens.data[:, -kept:]))
        return length, (tokens,)

    def abort(self, id: str) -> None:
        """End a request, if it runs or waits."""
        with self._wake:
            self._aborts.append(id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """Return how it is now."""
        sequences = sum(len(each.open) for each in list(self._running.values()))
        scheduled, used = self._usage
        running = min(scheduled, sequences)
        return EngineStats(
            running,
            sum(len(each.configs) for each in (*self._coming, *self._untried.values())) + sequences - running,
            self._blocks,
            self._blocks - used,
            _BLOCK,
            self._able.context_length,
            self._able.most_sequences,
            self._prompt_tokens,
            self._generated_tokens,
            self._failures,
            # What the text so far suggests is not told.
            drafted=None if self._options.draft is None else self._drafted,
            accepted=self._accepted if self._options.speculates else None,
        )

    def capabilities(self) -> Capabilities:
        """Return what it can do."""
        return self._able

    def is_healthy(self) -> bool:
        """Return whether the thread is there to take requests up."""
        return self._thread.is_alive() and not self._stopping

    def is_ready(self) -> bool:
        """Return whether there is a pipeline."""
        return self.is_healthy() and self._pipeline is not None

    def stop(self) -> None:
        """Abort what runs, and let go of the model."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()
            self._grammars.close()
        self._pipeline = self._tokenizer = None

    # The engine's thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._coming or self._wrong or self._aborts or self._stopping or self._unfinished()):
                    self._wake.wait()
                if self._stopping:
                    self._take_all()
                coming, wrong, aborts = list(self._coming), list(self._wrong), list(self._aborts)
                self._running |= {running.id: running for running in coming}
                # Nobody wants to know any more what is wrong with their grammars.
                self._running |= {id: self._untried.pop(id) for id in aborts if id in self._untried}
                self._coming.clear()
                self._wrong.clear()
                self._aborts.clear()
            if self._stopping:
                self._finish()
                return
            try:
                for running, error in wrong:
                    running.fail(error)
                for running in coming:
                    self._begin(running)
                self._cut(aborts)
                self._pipeline.step()
                self._deliver()
                self._stepped(self.stats())
            except Exception as error:  # Whatever it is, what is in the pipeline is lost.
                if not self._begin_anew(error):
                    return

    def _take_all(self) -> None:
        """Take up those, too, that cannot begin any more, so that they are told why. Under the lock."""
        for running in (*self._coming, *self._untried.values(), *(running for running, _ in self._wrong)):
            self._running[running.id] = running
        self._coming.clear()
        self._untried.clear()
        self._wrong.clear()

    def _unfinished(self) -> bool:
        # What was cancelled holds its memory until the next step.
        return bool(self._running) or self._pipeline.has_non_finished_requests()

    def _begin(self, running: Running) -> None:
        numbers = range(self._sequences, self._sequences + len(running.configs))
        self._sequences = numbers.stop
        try:
            running.begin(self._pipeline, numbers)
        except Exception as error:  # Of this request alone: no step has seen it.
            del self._running[running.id]
            if "'max_length'" in str(error):
                most = self._able.context_length
                running.fail(InvalidArgument(f"the prompt with its images has more than {most} tokens, the context"))
            else:
                running.fail(translated(error, "beginning a request"))
            return
        self._prompt_tokens += running.prompt_tokens

    def _cut(self, aborts: Iterable[str]) -> None:
        """End the requests that are not wanted any more, and those that are too late."""
        for id in aborts:
            running = self._running.pop(id, None)
            if running is not None:
                running.abort()
        now = time.monotonic_ns()
        for running in list(self._running.values()):
            if 0 < running.request.deadline_ns <= now:
                del self._running[running.id]
                running.fail(TooLate("the deadline of the request has passed while it ran"))

    def _deliver(self) -> None:
        """Hand on what the step has brought."""
        fresh = [sequence for running in self._running.values() for sequence in list(running.open) if sequence.read()]
        texts = decoded(self._tokenizer, fresh)
        deltas: dict[Running, list[Delta]] = {}
        for sequence, text in zip(fresh, texts, strict=True):
            self._generated_tokens += len(sequence.tokens)
            drafted, accepted = sequence.guesses(self._options.guesses)
            self._drafted += drafted
            self._accepted += accepted
            deltas.setdefault(sequence.of, []).append(sequence.delta(self._tokenizer, text))
        for running, new in deltas.items():
            if not running.open:
                del self._running[running.id]
            running.listener.advanced(new)
        self._usage = self._used() if self._unfinished() else (0, 0)

    def _used(self) -> tuple[int, int]:
        """Return the sequences of the last step, and the blocks that it used. At rest these numbers stand still."""
        metrics = self._pipeline.get_metrics()
        return metrics.scheduled_requests, round(metrics.cache_usage / 100 * self._blocks)

    def _begin_anew(self, error: Exception) -> bool:
        """Fail what ran, and make another pipeline; return whether that was possible."""
        reason = translated(error, "a step of the engine").message
        _log.error("'%s': %s; the engine begins anew", self._options.name, reason)
        self._failures += 1
        self._usage = (0, 0)
        self._fail_all(Internal(f"The engine failed while it ran this request: {reason}"))
        self._pipeline = None
        try:
            self._pipeline = framework.pipeline(self._options, self._tokenizer)
        except Exception as failure:  # It is not healthy from now on.
            why = translated(failure, "loading model").message
            with self._wake:
                self._stopping = True
                self._take_all()
            self._fail_all(Unavailable(f"The engine has failed and cannot begin anew: {why}"))
            self._given_up(f"'{self._options.name}': the engine cannot begin anew: {why}")
            return False
        return True

    def _fail_all(self, error: NeriteError) -> None:
        failed = list(self._running.values())
        self._running.clear()
        for running in failed:
            running.fail(error)
        self._stepped(self.stats())

    def _finish(self) -> None:
        """End what runs, and step on until the pipeline has let go of it."""
        for running in self._running.values():
            running.abort()
        self._running.clear()
        self._usage = (0, 0)
        self._stepped(self.stats())
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _capacity(self) -> int:
        """Return how many blocks the cache has. Nothing tells but the share of it that one block is."""
        config = framework.common(self._options)
        config.max_new_tokens = 1
        prompt: Sequence[Any] = ("0", []) if self._options.sees else (openvino().Tensor(np.zeros((1, 1), np.int64)),)
        handle = self._pipeline.add_request(self._sequences, *prompt, config)
        self._sequences += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        share = self._pipeline.get_metrics().max_cache_usage
        del handle
        return round(100 / share) if share else 1
