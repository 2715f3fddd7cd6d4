"""The pipeline process, which runs the steps of a pipeline and nothing else.

A step holds the GIL until it is done. So all other work for a token, such as detokenization and delivery to its caller,
is done by the engine in another process while the next step runs.

Run as a program, this module is that process. It ends when its standard input is closed, even in the middle of a step,
because its parent is gone then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.frameworks.openvino.graph import openvino, translated
from nerite.llm.engine import FinishReason
from nerite.llm.openvino_genai import framework
from nerite.llm.openvino_genai.grammars import Compiler
from nerite.llm.openvino_genai.messages import (
    Compiled,
    CompileOrder,
    DropOrder,
    FramedPipe,
    GenerationOrder,
    Piece,
    PipelineLoaded,
    PipelineStep,
)
from nerite.llm.openvino_genai.options import PipelineOptions
from nerite.llm.selection import OF_OPENVINO

AHEAD: Final = 2
"""Maximum number of finished steps whose results the engine has not yet handled."""

_Message: TypeAlias = GenerationOrder | DropOrder | CompileOrder


class Stepping:
    """Runs the steps of a pipeline and tracks its sequences."""

    def __init__(self, options: PipelineOptions, line: FramedPipe, turns: int) -> None:
        """``turns`` is a pipe with one byte per step that the engine handled. Raises what the framework raises."""
        self._options = options
        self._line = line
        self._turns = turns
        self._left = AHEAD
        self._tokenizer = framework.tokenizer(options.directory)
        self._pipeline = framework.pipeline(options, self._tokenizer)
        self._compiler: Compiler | None = None
        library = framework.genai()
        self._running = library.GenerationStatus.RUNNING
        reasons = library.GenerationFinishReason
        self._reasons = {reasons.STOP: FinishReason.STOP, reasons.LENGTH: FinishReason.LENGTH}
        self._sending = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._begun: list[int] = []
        self._refused: list[tuple[int, NeriteError]] = []
        self._blocks = self._capacity()
        self._began_ns = 0
        """When the next step began: at the end of the one before, or when work came after a pause."""

    def loaded(self) -> PipelineLoaded:
        """Return the message that the model is loaded."""
        own = self._pipeline.get_config()
        configured = {own.eos_token_id, *own.stop_token_ids} if self._options.ends is None else self._options.ends
        ends = {self._tokenizer.get_eos_token_id(), *configured}
        return PipelineLoaded(self._blocks, frozenset(end for end in ends if end >= 0))

    def run(self) -> None:
        """Run steps while sequences are unfinished; otherwise wait for messages. Return after a failure."""
        while True:
            unfinished = self._unfinished()
            while self._line.waits(0 if unfinished else None):
                if not unfinished:
                    self._began_ns = time.monotonic_ns()
                message: _Message = self._line.receive()
                if isinstance(message, CompileOrder):
                    threading.Thread(target=self._compile, args=(message,), daemon=True).start()
                    continue
                self._take(message)
                unfinished = True  # every order is followed by a step, even a drop alone
            if not self._step():
                return

    def _take(self, message: GenerationOrder | DropOrder) -> None:
        if isinstance(message, GenerationOrder):
            self._begin(message)
            return
        for number in message.numbers:
            handle = self._handles.pop(number, None)
            if handle is not None:
                handle.cancel()

    def _begin(self, order: GenerationOrder) -> None:
        given = openvino().Tensor
        prompt = order.prompt
        arguments: Sequence[Any] = (
            (prompt[0], [given(image) for image in prompt[1]]) if isinstance(prompt, tuple) else (given(prompt),)
        )
        form = None
        for index, number in enumerate(order.numbers):
            try:
                if form is None and order.grammar is not None:
                    form = framework.structured(order.grammar)
                config = framework.generation(self._options, order.sampling, index, order.room, order.ends, form)
                if order.most:  # the number of image tokens is known only when the pipeline has encoded them
                    config.max_length = order.most
                    config.apply_chat_template = not order.special_tokens
                self._handles[number] = self._pipeline.add_request(number, *arguments, config)
            except Exception as error:  # affects only this request, which was in no step yet
                self._refused.append((number, _refusal(error, order.most)))
            else:
                self._begun.append(number)

    def _step(self) -> bool:
        """Run a step and send its results; return False after a failure."""
        while not self._left:
            self._left += len(os.read(self._turns, AHEAD))
        self._left -= 1
        failure, pieces = "", []
        scheduled = blocks = 0
        try:
            if self._unfinished():
                self._pipeline.step()
            pieces = self._pieces()
            if self._unfinished():  # the metrics are not updated while the pipeline is idle
                metrics = self._pipeline.get_metrics()
                scheduled, blocks = metrics.scheduled_requests, round(metrics.cache_usage / 100 * self._blocks)
        except Exception as error:  # whatever it is, everything in the pipeline is lost
            failure = translated(error, "a step of the engine").message
        begun, self._begun = self._begun, []
        refused, self._refused = self._refused, []
        began, self._began_ns = self._began_ns, time.monotonic_ns()
        self._send(PipelineStep(begun, refused, pieces, scheduled, blocks, began, self._began_ns, failure))
        return not failure

    def _pieces(self) -> list[Piece]:
        pieces = []
        for number, handle in list(self._handles.items()):
            tokens: list[int] = []
            logprobs: list[float] = []
            ended, counted = None, 0
            # Not ``read_all``, which would wait for the end.
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
                    logprobs += output.generated_log_probs
                    ended = self._reasons.get(output.finish_reason)
            if ended:
                del self._handles[number]
                if self._options.sees:  # the count is available only at the end
                    counted = handle.get_vlm_perf_metrics().get_num_input_tokens()
            elif handle.get_status() != self._running:
                # The pipeline reports nothing more about a request that it ignores.
                raise Internal("the pipeline ignores a request that was admitted")
            if tokens or ended:
                pieces.append((number, tokens, logprobs, ended, counted))
        return pieces

    def _unfinished(self) -> bool:
        # Cancelled requests count as unfinished because they hold their memory until the next step.
        unfinished: bool = self._pipeline.has_non_finished_requests()
        return unfinished

    def _compile(self, compile: CompileOrder) -> None:
        """Compile a grammar. Runs in a thread of its own, so that other steps do not wait."""
        grammar, ends, vocabulary = compile
        try:
            if self._compiler is None:
                self._compiler = Compiler(vocabulary, self._tokenizer)
            wrong = self._compiler.wrong(grammar, ends)
        except Exception as error:
            wrong = f"it could not be compiled: {error}"
        self._send(Compiled(wrong))

    def _send(self, message: PipelineStep | Compiled) -> None:
        with self._sending:
            self._line.send(message)

    def _capacity(self) -> int:
        """Return the number of blocks of the cache, computed from the share of it that one block takes."""
        config = framework.common(self._options)
        config.max_new_tokens = 1
        prompt: Sequence[Any] = ("0", []) if self._options.sees else (openvino().Tensor(np.zeros((1, 1), np.int64)),)
        handle = self._pipeline.add_request(0, *prompt, config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        share = self._pipeline.get_metrics().max_cache_usage
        del handle
        return round(100 / share) if share else 1


def _refusal(error: Exception, most: int) -> NeriteError:
    if "'max_length'" in str(error):
        return InvalidArgument(f"the prompt with its images has more than {most} tokens, the context")
    return translated(error, "starting a request")


def _end_with_input() -> None:
    """Have the kernel kill this process when its standard input is closed, whatever the process is doing."""
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it was already closed
        sys.exit(0)


def _remedy(options: PipelineOptions) -> str:
    """Return advice for a model that cannot be loaded; empty if its configuration sets no properties."""
    chosen = [f"{name}={value}" for name, value in (options.properties or {}).items() if name in OF_OPENVINO]
    return f"Its parameters set {', '.join(chosen)}: check that the device supports that" if chosen else ""


def main() -> None:
    """Receive the options, load the model and run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    _end_with_input()
    line, turns = FramedPipe(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2])
    options: PipelineOptions = line.receive()
    try:
        stepping = Stepping(options, line, turns)
        loaded = stepping.loaded()
    except Exception as error:  # any error of the framework explains why the model cannot be loaded
        line.send(translated(error, "loading model", _remedy(options)))
        return
    line.send(loaded)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        stepping.run()
