"""Grammars are tried before the pipeline sees them: one that cannot be compiled would fail each of its steps, for all.

A thread tries them one after the other, so that requests without a new grammar need not wait for it. What is compiled
stays with a pipeline's tokenizer for as long as there is one. So there has to be another one at times.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import resource
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from sys import getsizeof
from typing import Any, Final

import numpy as np

from nerite.core import memory
from nerite.core.byte_budget import GRAMMARS, Memo
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.frameworks.openvino.graph import openvino
from nerite.llm.openvino_genai import framework
from nerite.llm.openvino_genai.options import PipelineOptions
from nerite.llm.structured_output import REGEX, Grammar

# Compiling a grammar to see what becomes of it: here, or first in a process of its own.
#
# Some grammars of a few characters take longer than anybody waits, and some take their process with them. What does
# not fit into a process that is given seconds for it does not come here.
#
# As a program it is that process: a line in is a grammar, a line out is what is wrong with it.

LONGEST_SECONDS: Final = 5.0
"""For one grammar."""
_START_SECONDS: Final = 60.0
_MOST_CORES: Final = 8
"""On which the framework compiles."""
_MODEL: Final = "model.xml"
_SIMPLE: Final = Grammar(REGEX, "a")
_PLACE: Final = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""What stands before the words that matter."""


class Compiler:
    """A pipeline with a network that finds all tokens equally likely. It compiles with the first token it chooses.

    What is compiled is kept with the tokenizer, where other pipelines with it find it.
    """

    def __init__(self, vocabulary: int, tokenizer: Any) -> None:
        """``vocabulary``: as many tokens as the model of the other pipelines has. Raises what the framework raises."""
        ov = openvino()
        with tempfile.TemporaryDirectory(prefix="nerite-") as folder:
            file = Path(folder) / _MODEL
            ov.save_model(_indifferent(vocabulary), file, compress_to_fp16=False)
            text, weights = file.read_text(), file.with_suffix(".bin").read_bytes()
        self._pipeline = framework.genai().LLMPipeline(
            text, ov.Tensor(np.frombuffer(weights, np.uint8)), tokenizer, "CPU", ATTENTION_BACKEND="SDPA"
        )

    def wrong(self, grammar: Grammar, ends: Collection[int]) -> str:
        """Return why there can be no text of this form that one of the tokens ``ends`` ends; nothing if there can."""
        config = framework.genai().GenerationConfig()
        config.max_new_tokens = 1
        config.stop_token_ids = set(ends)
        try:
            config.structured_output_config = framework.structured(grammar)
            self._pipeline.generate(openvino().Tensor(np.zeros((1, 1), np.int64)), config)
        except Exception as error:  # Whatever it is, it would be the same in the other pipelines.
            return _PLACE.sub("", " ".join(str(error).split())) or type(error).__name__
        return ""


def _indifferent(vocabulary: int) -> Any:
    """Return the network: for each token of the input the same number for each of the vocabulary."""
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
    """A compiler that may be lost. For one thread, but for ``close``."""

    def __init__(self, vocabulary: int, directory: Path) -> None:
        """``directory`` has the tokenizer. The process is made when there is something to compile."""
        self._arguments = [str(vocabulary), str(directory)]
        self._process: subprocess.Popen[bytes] | None = None
        self._bare = 0
        """What it took before it compiled anything."""

    @property
    def compiled_bytes(self) -> int:
        """What the grammars that it has compiled take of its memory; 0 where the system does not tell."""
        return 0 if self._process is None else max(memory.memory_of(self._process.pid) - self._bare, 0)

    def wrong(self, grammar: Grammar, ends: Collection[int]) -> str:
        """Return why a grammar cannot be compiled, or not in time; nothing if it can."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # It was ended, and not by this grammar.
        process = self._process or self._started()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps([grammar.kind, grammar.source, sorted(ends)]).encode() + b"\n")
            process.stdin.flush()
            answer = _line(process, LONGEST_SECONDS)
        except TimeoutError:
            self.close()
            return f"it takes more than {LONGEST_SECONDS:g} seconds to compile: make it simpler"
        except OSError:
            self.close()
            return "its compiler does not survive it: make it simpler"
        wrong: str = json.loads(answer)
        return wrong

    def close(self) -> None:
        """End the process. Another is made when it is needed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        """Make the process. Raises ``OSError`` if it does not come up."""
        process = self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            _line(process, _START_SECONDS)
        except OSError:
            self.close()
            raise
        self._bare = memory.memory_of(process.pid)
        return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the next line that a process writes. Raises ``TimeoutError``, or ``OSError`` if it has ended."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], seconds)[0]:
        raise TimeoutError
    # It writes a line at once, and only when asked.
    line = process.stdout.readline()
    if not line:
        raise BrokenPipeError("the process that compiles grammars has ended")
    return line


def main() -> None:
    """Compile what comes, as long as somebody asks."""
    # What libraries print is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    compiler = Compiler(int(sys.argv[1]), framework.tokenizer(Path(sys.argv[2])))
    compiler.wrong(_SIMPLE, ())  # What it takes for the first one is not that one's.
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        kind, source, ends = json.loads(line)
        # Nobody may be left to end it.
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + LONGEST_SECONDS * _MOST_CORES + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        print(json.dumps(compiler.wrong(Grammar(kind, source), ends)), file=answers, flush=True)


_log = logging.getLogger("nerite.llm")
_MOST: Final = 4096
"""Grammars that are known to be good."""
MOST_BYTES: Final = 512 << 20
"""What the good ones may take; as much as vLLM gives them."""
_LARGE: Final = 4
"""One that takes more than this part of it is too large."""
_LONGEST_REASON: Final = 1000

_Key = bytes
_Then = Callable[[NeriteError | None], None]


class Grammars:
    """Tries grammars. May be used from any thread."""

    def __init__(self, options: PipelineOptions, compile: Callable[[Grammar, Collection[int], int], str]) -> None:
        """``compile`` has one compiled where it is used, and returns what is wrong with it. Raises ``NeriteError``."""
        self._options = options
        self._compile = compile
        self._lock = threading.Lock()
        self._good: set[_Key] = set()
        """Those that are compiled."""
        self._bad: Memo[_Key, str] = Memo()
        """What is wrong with others."""
        self._vocabulary = 0
        """How many tokens the model knows; 0 until it was looked for."""
        self._asked: queue.SimpleQueue[tuple[Grammar, frozenset[int], _Then] | None] = queue.SimpleQueue()
        self._compiled = 0
        """Bytes that the good ones take."""
        self._room = threading.Event()
        """There is room for more."""
        self._room.set()
        self._thread: threading.Thread | None = None
        self._apart: CompilerProcess | None = None

    @property
    def full(self) -> bool:
        """Whether nothing is tried any more until ``forget``."""
        return not self._room.is_set()

    def forget(self) -> None:
        """Begin anew: what has compiled them is gone, and what takes its place has compiled nothing."""
        self._good.clear()
        if not self.full:
            return
        self._compiled = 0
        if self._apart is not None:
            self._apart.close()
        self._room.set()

    def known(self, grammar: Grammar, ends: Collection[int]) -> bool:
        """Return whether a text of this form, which one of the tokens ``ends`` ends, is known to be possible.

        Raises ``InvalidArgument`` if it is known that it is not.
        """
        if not self._vocabulary:
            logits = openvino().Core().read_model(self._options.model).output("logits")
            self._vocabulary = logits.get_partial_shape()[2].get_length()
        if max(ends) >= self._vocabulary:  # the framework would write where it must not
            raise InvalidArgument(f"'stop_token_ids' has {max(ends)}, and the vocabulary {self._vocabulary} tokens")
        key = _key(grammar, ends)
        if wrong := self._bad.get(key):
            raise _refusal(grammar, wrong)
        return key in self._good

    def find_out(self, grammar: Grammar, ends: Collection[int], then: Callable[[NeriteError | None], None]) -> None:
        """Try a grammar, and tell ``then`` what is wrong with it, if anything is. On a thread of its own."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        self._asked.put((grammar, frozenset(ends), then))

    def close(self) -> None:
        """End the thread, after what it tries just now."""
        if self._thread is not None:
            self._asked.put(None)
            self._room.set()
            self._thread.join()
        if self._apart is not None:
            self._apart.close()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            grammar, ends, then = asked
            self._room.wait()
            try:
                wrong = self._looked_at(grammar, ends)
                then(_refusal(grammar, wrong) if wrong else None)
            except Exception as error:
                _log.exception("'%s': a grammar could not be tried", self._options.name)
                then(Internal(f"structured output ({grammar.kind}) could not be tried: {error}"))

    def _looked_at(self, grammar: Grammar, ends: Collection[int]) -> str:
        """Return what is wrong with a grammar, and know it from now on."""
        key = _key(grammar, ends)
        if key in self._good:
            return ""
        wrong = self._bad.get(key) or self._wrong(grammar, ends)[:_LONGEST_REASON]
        if wrong:
            GRAMMARS.put(self._bad, key, wrong, len(key) + getsizeof(wrong))
        else:
            self._good.add(key)
            if self._compiled > MOST_BYTES or len(self._good) >= _MOST:
                self._room.clear()
        return wrong

    def _wrong(self, grammar: Grammar, ends: Collection[int]) -> str:
        """Return what is wrong with a grammar. What it takes is seen in the process, which does nothing else."""
        if self._apart is None:
            self._apart = CompilerProcess(self._vocabulary, self._options.directory)
        before = self._apart.compiled_bytes
        if wrong := self._apart.wrong(grammar, ends):
            return wrong
        taken = self._apart.compiled_bytes - before
        if taken > MOST_BYTES // _LARGE:
            self._apart.close()
            return f"compiled it takes {taken >> 20} MB: make it simpler"
        self._compiled += max(taken, 0)
        return self._compile(grammar, ends, self._vocabulary)


def _key(grammar: Grammar, ends: Collection[int]) -> _Key:
    return grammar.digest(sorted(ends))


def _refusal(grammar: Grammar, wrong: str) -> NeriteError:
    return InvalidArgument(f"structured output ({grammar.kind}): {wrong}")
