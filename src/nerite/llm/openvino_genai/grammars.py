"""Compiles grammars before the pipeline uses them, because a grammar that does not compile would fail all its steps.

A thread compiles them one after the other, so that requests without a new grammar do not wait. Some grammars of a few
characters take far too long or crash their process, so each is first compiled in a sandbox process with a time limit.
Run as a program, this module is that process: it receives a grammar and sends its error or an empty string.

Compiled grammars stay with a pipeline's tokenizer until it is destroyed. So at times the pipeline has to be replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sys import getsizeof
from typing import Any, Final

import numpy as np

from nerite.core import memory
from nerite.core.byte_budget import GRAMMARS, Memo
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.frameworks.openvino.graph import openvino
from nerite.llm.openvino_genai import framework
from nerite.llm.openvino_genai.messages import FramedPipe
from nerite.llm.openvino_genai.options import PipelineOptions
from nerite.llm.structured_output import REGEX, Grammar

LONGEST_SECONDS: Final = 5.0
"""Time limit for compiling one grammar."""
_START_SECONDS: Final = 60.0
_MAX_CORES: Final = 8
"""Number of cores that the framework compiles on."""
_MODEL: Final = "model.xml"
_SIMPLE: Final = Grammar(REGEX, "a")
_PLACE: Final = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""Prefix of the framework's error messages, which is removed."""


class Compiler:
    """Compiles grammars by generating one token with a dummy network that finds all tokens equally likely.

    Compiled grammars are stored with the tokenizer, where other pipelines with the same tokenizer find them.
    """

    def __init__(self, vocabulary: int, tokenizer: Any) -> None:
        """``vocabulary`` is the vocabulary size of the real model. Raises what the framework raises."""
        ov = openvino()
        with tempfile.TemporaryDirectory(prefix="nerite-") as folder:
            file = Path(folder) / _MODEL
            ov.save_model(_uniform_network(vocabulary), file, compress_to_fp16=False)
            text, weights = file.read_text(), file.with_suffix(".bin").read_bytes()
        self._pipeline = framework.genai().LLMPipeline(
            text, ov.Tensor(np.frombuffer(weights, np.uint8)), tokenizer, "CPU", ATTENTION_BACKEND="SDPA"
        )

    def wrong(self, grammar: Grammar, ends: Collection[int]) -> str:
        """Return why no text that ends with one of the tokens ``ends`` can match the grammar; empty if one can."""
        config = framework.genai().GenerationConfig()
        config.max_new_tokens = 1
        config.stop_token_ids = set(ends)
        try:
            config.structured_output_config = framework.structured(grammar)
            self._pipeline.generate(openvino().Tensor(np.zeros((1, 1), np.int64)), config)
        except Exception as error:  # whatever it is, the real pipeline would fail in the same way
            return _PLACE.sub("", " ".join(str(error).split())) or type(error).__name__
        return ""


def _uniform_network(vocabulary: int) -> Any:
    """Return a network that outputs equal logits for the whole vocabulary."""
    ov = openvino()
    ops = ov.opset15
    inputs = {"input_ids": ov.Type.i64, "attention_mask": ov.Type.i64, "beam_idx": ov.Type.i32}
    parameters = []
    for name, element in inputs.items():
        parameter = ops.parameter(ov.PartialShape([-1] * (1 if name == "beam_idx" else 2)), element, name=name)
        parameter.output(0).set_names({name})
        parameters.append(parameter)
    shape = ops.concat([ops.shape_of(parameters[0]), ops.constant(np.array([vocabulary], np.int64))], 0)
    logits = ops.broadcast(ops.constant(np.float32(0)), shape)
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], parameters, "indifferent")


class CompilerProcess:
    """A ``Compiler`` in a disposable process. For one thread, except ``close``."""

    def __init__(self, vocabulary: int, directory: Path) -> None:
        """``directory`` holds the tokenizer. The process is started lazily."""
        self._arguments = [str(vocabulary), str(directory)]
        self.process: subprocess.Popen[bytes] | None = None
        self._pipe: FramedPipe
        self._baseline = 0
        """Memory of the process before it compiled anything."""

    @property
    def compiled_bytes(self) -> int:
        """Memory of the compiled grammars in the process; 0 if the system does not report memory."""
        return 0 if self.process is None else max(memory.memory_of(self.process.pid) - self._baseline, 0)

    def wrong(self, grammar: Grammar, ends: Collection[int]) -> str:
        """Return why a grammar cannot be compiled in time; empty if it can."""
        if self.process is not None and self.process.poll() is not None:
            self.close()  # it ended for another reason than this grammar
        if self.process is None:
            self._start()
        try:
            self._pipe.send((grammar, ends))
            return self._receive(LONGEST_SECONDS)
        except TimeoutError:
            self.close()
            return f"it takes more than {LONGEST_SECONDS:g} seconds to compile: make it simpler"
        except OSError:
            self.close()
            return "it crashes the compiler: make it simpler"

    def close(self) -> None:
        """End the process. Another is started when it is needed."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            self._pipe.close()

    def _start(self) -> None:
        """Start the process. Raises ``OSError`` if it does not come up."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno()), *self._arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(),),
            )
        self._pipe = FramedPipe(ours)
        try:
            self._receive(_START_SECONDS)
        except OSError:
            self.close()
            raise
        self._baseline = memory.memory_of(self.process.pid)

    def _receive(self, seconds: float) -> str:
        """Return the next message. Raises ``TimeoutError``, or another ``OSError`` if the process has ended."""
        if not self._pipe.waits(round(seconds * 1000)):
            raise TimeoutError
        try:
            message: str = self._pipe.receive()
        except EOFError:
            raise BrokenPipeError("the process that compiles grammars has ended") from None
        return message


def main() -> None:
    """Compile the grammars that arrive on a socket until it is closed."""
    pipe = FramedPipe(socket.socket(fileno=int(sys.argv[1])))
    compiler = Compiler(int(sys.argv[2]), framework.tokenizer(Path(sys.argv[3])))
    # Warm-up: the memory of the first compilation is not due to its grammar.
    pipe.send(compiler.wrong(_SIMPLE, ()))
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            grammar, ends = pipe.receive()
            # The parent may have ended and cannot enforce the time limit then.
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(used.ru_utime + used.ru_stime + LONGEST_SECONDS * _MAX_CORES + 1)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            pipe.send(compiler.wrong(grammar, ends))


_log = logging.getLogger("nerite.llm")
_MAX_COUNT: Final = 4096
"""Maximum number of compiled grammars."""
MAX_BYTES: Final = 512 << 20
"""Maximum memory of compiled grammars, the same as in vLLM."""
_LARGE: Final = 4
"""A grammar that takes more than this fraction (1/4) of ``MAX_BYTES`` is rejected."""
_LONGEST_REASON: Final = 1000

_Key = bytes


class Grammars:
    """Validates grammars by compiling them, and remembers the results. Thread-safe."""

    def __init__(self, options: PipelineOptions, compile: Callable[[Grammar, Collection[int], int], str]) -> None:
        """``compile`` compiles a grammar in the pipeline process and returns its error. Raises ``NeriteError``."""
        self._options = options
        self._compile = compile
        self._good: set[_Key] = set()
        """Grammars that are compiled in the pipeline process."""
        self._bad: Memo[_Key, str] = Memo()
        """Errors of invalid grammars."""
        self._vocabulary = 0
        """Size of the model's vocabulary; 0 until it was read."""
        self._thread = ThreadPoolExecutor(1, "grammars")
        self.compiled_bytes = 0
        """Memory of the compiled grammars in bytes."""
        self._room = threading.Event()
        """Set while more grammars may be compiled."""
        self._room.set()
        self._sandbox: CompilerProcess | None = None

    @property
    def full(self) -> bool:
        """Whether no more grammars are compiled until ``forget``."""
        return not self._room.is_set()

    def forget(self) -> None:
        """Forget the compiled grammars, because the pipeline process that held them was replaced."""
        self._good.clear()
        if not self.full:
            return
        self.compiled_bytes = 0
        if self._sandbox is not None:
            self._sandbox.close()
        self._room.set()

    def known(self, grammar: Grammar, ends: Collection[int]) -> bool:
        """Return whether a grammar with the end tokens ``ends`` is compiled in the pipeline process.

        Raises ``InvalidArgument`` if it is known to be invalid.
        """
        if not self._vocabulary:
            self._vocabulary = framework.vocabulary_size(self._options)
        if max(ends) >= self._vocabulary:  # the framework would write out of bounds
            raise InvalidArgument(f"'stop_token_ids' has {max(ends)}, but the vocabulary has {self._vocabulary} tokens")
        key = _key(grammar, ends)
        if wrong := self._bad.get(key):
            raise _refusal(grammar, wrong)
        return key in self._good

    def find_out(self, grammar: Grammar, ends: Collection[int], then: Callable[[NeriteError | None], None]) -> None:
        """Compile a grammar in a background thread, and call ``then`` with its error or None; not after ``close``."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._thread.submit(self._answer, grammar, ends, then)

    def close(self) -> None:
        """Stop the thread after the current grammar."""
        self._room.set()
        self._thread.shutdown(cancel_futures=True)
        if self._sandbox is not None:
            self._sandbox.close()

    def _answer(self, grammar: Grammar, ends: Collection[int], then: Callable[[NeriteError | None], None]) -> None:
        self._room.wait()
        try:
            wrong = self._validate(grammar, ends)
            then(_refusal(grammar, wrong) if wrong else None)
        except Exception as error:
            _log.exception("'%s': a grammar could not be compiled", self._options.name)
            then(Internal(f"structured output ({grammar.kind}) could not be compiled: {error}"))

    def _validate(self, grammar: Grammar, ends: Collection[int]) -> str:
        """Return the error of a grammar, and remember the result."""
        key = _key(grammar, ends)
        if key in self._good:
            return ""
        wrong = self._bad.get(key) or self._wrong(grammar, ends)[:_LONGEST_REASON]
        if wrong:
            GRAMMARS.put(self._bad, key, wrong, len(key) + getsizeof(wrong))
        else:
            self._good.add(key)
            if self.compiled_bytes > MAX_BYTES or len(self._good) >= _MAX_COUNT:
                self._room.clear()
        return wrong

    def _wrong(self, grammar: Grammar, ends: Collection[int]) -> str:
        """Return the error of a grammar. Its memory is measured in the sandbox process, which does nothing else."""
        if self._sandbox is None:
            self._sandbox = CompilerProcess(self._vocabulary, self._options.directory)
        before = self._sandbox.compiled_bytes
        if wrong := self._sandbox.wrong(grammar, ends):
            return wrong
        taken = self._sandbox.compiled_bytes - before
        if taken > MAX_BYTES // _LARGE:
            self._sandbox.close()
            return f"compiled it takes {taken >> 20} MB: make it simpler"
        self.compiled_bytes += max(taken, 0)
        return self._compile(grammar, ends, self._vocabulary)


def _key(grammar: Grammar, ends: Collection[int]) -> _Key:
    return grammar.digest(sorted(ends))


def _refusal(grammar: Grammar, wrong: str) -> NeriteError:
    return InvalidArgument(f"structured output ({grammar.kind}): {wrong}")
