"""The process that steps a pipeline, and does nothing else.

A step holds the interpreter for as long as it takes. So what else there is to do for a token, its text and the way to
its caller, is done by another process while the next step runs.

As a program it is that process. It ends when its standard input does, also in the middle of a step: then there is
nobody left who could want anything.
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
"""Steps that may be over before the first of them was looked at."""

_Message: TypeAlias = GenerationOrder | DropOrder | CompileOrder


class Stepping:
    """A pipeline, and the sequences in it."""

    def __init__(self, options: PipelineOptions, line: FramedPipe, turns: int) -> None:
        """``turns`` is where a byte comes for each step that was looked at. Raises what the framework raises."""
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

    def loaded(self) -> PipelineLoaded:
        """Return what there is to say of the model."""
        own = self._pipeline.get_config()
        ends = {own.eos_token_id, self._tokenizer.get_eos_token_id(), *own.stop_token_ids}
        return PipelineLoaded(self._blocks, frozenset(end for end in ends if end >= 0))

    def run(self) -> None:
        """PipelineStep as long as there is something to generate, and otherwise when something comes.

        Returns on a failure.
        """
        while True:
            unfinished = self._unfinished()
            while self._line.waits(0 if unfinished else None):
                message: _Message = self._line.receive()
                if isinstance(message, CompileOrder):
                    threading.Thread(target=self._compile, args=(message,), daemon=True).start()
                    continue
                self._take(message)
                unfinished = True  # A drop alone is told of, too.
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
                if order.most:  # how many tokens images are is known when the pipeline has encoded them
                    config.max_length = order.most
                    config.apply_chat_template = not order.special_tokens
                self._handles[number] = self._pipeline.add_request(number, *arguments, config)
            except Exception as error:  # Of this request alone: no step has seen it.
                self._refused.append((number, _refusal(error, order.most)))
            else:
                self._begun.append(number)

    def _step(self) -> bool:
        """Take a step, and tell what it has brought; return whether there may be another."""
        while not self._left:
            self._left += len(os.read(self._turns, AHEAD))
        self._left -= 1
        failure, pieces = "", []
        scheduled = blocks = 0
        try:
            if self._unfinished():
                self._pipeline.step()
            pieces = self._pieces()
            if self._unfinished():  # At rest these numbers stand still.
                metrics = self._pipeline.get_metrics()
                scheduled, blocks = metrics.scheduled_requests, round(metrics.cache_usage / 100 * self._blocks)
        except Exception as error:  # Whatever it is, what is in the pipeline is lost.
            failure = translated(error, "a step of the engine").message
        begun, self._begun = self._begun, []
        refused, self._refused = self._refused, []
        self._send(PipelineStep(begun, refused, pieces, scheduled, blocks, failure))
        return not failure

    def _pieces(self) -> list[Piece]:
        pieces = []
        for number, handle in list(self._handles.items()):
            tokens: list[int] = []
            likely: list[float] = []
            ended, counted = None, 0
            # ``read_all`` would wait for the end.
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
                    likely += output.generated_log_probs
                    ended = self._reasons.get(output.finish_reason)
            if ended:
                del self._handles[number]
                if self._options.sees:  # Before the end it does not tell.
                    counted = handle.get_vlm_perf_metrics().get_num_input_tokens()
            elif handle.get_status() != self._running:
                # The pipeline says nothing more of a request that it will not do.
                raise Internal("the pipeline ignores a request that was admitted")
            if tokens or ended:
                pieces.append((number, tokens, likely, ended, counted))
        return pieces

    def _unfinished(self) -> bool:
        # What was cancelled holds its memory until the next step.
        unfinished: bool = self._pipeline.has_non_finished_requests()
        return unfinished

    def _compile(self, compile: CompileOrder) -> None:
        """CompileOrder a grammar. On a thread of its own: steps that do not need it need not wait."""
        grammar, ends, vocabulary = compile
        try:
            if self._compiler is None:
                self._compiler = Compiler(vocabulary, self._tokenizer)
            wrong = self._compiler.wrong(grammar, ends)
        except Exception as error:
            wrong = f"it could not be tried: {error}"
        self._send(Compiled(wrong))

    def _send(self, message: PipelineStep | Compiled) -> None:
        with self._sending:
            self._line.send(message)

    def _capacity(self) -> int:
        """Return how many blocks the cache has. Nothing tells but the share of it that one block is."""
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
    return translated(error, "beginning a request")


def _end_with_input() -> None:
    """Have this process ended by the system when its standard input is closed, whatever it is doing then."""
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # It was closed before.
        sys.exit(0)


def _remedy(options: PipelineOptions) -> str:
    """Return what to do about a model that cannot be loaded: nothing that is known, where its parameters are none."""
    chosen = [f"{name}={value}" for name, value in (options.properties or {}).items() if name in OF_OPENVINO]
    return f"Its parameters say {', '.join(chosen)}: does the device have that?" if chosen else ""


def main() -> None:
    """Load the model that comes first, and run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever started this ends it.
    _end_with_input()
    line, turns = FramedPipe(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2])
    options: PipelineOptions = line.receive()
    try:
        stepping = Stepping(options, line, turns)
        loaded = stepping.loaded()
    except Exception as error:  # Whatever the framework raises says why the model cannot be loaded.
        line.send(translated(error, "loading model", _remedy(options)))
        return
    line.send(loaded)
    with contextlib.suppress(EOFError, OSError):  # Nobody listens any more.
        stepping.run()
