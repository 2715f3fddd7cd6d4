"""Compiling a grammar to see what becomes of it: here, or first in a process of its own.

Some grammars of a few characters take longer than anybody waits, and some take their process with them. What does not
fit into a process that is given seconds for it does not come here.

As a program it is that process: a line in is a grammar, a line out is what is wrong with it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np

from nerite.backends.llm.openvino_genai import framework
from nerite.backends.llm.structured import REGEX, Grammar
from nerite.backends.openvino.framework import openvino
from nerite.core import process_memory

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
        return 0 if self._process is None else max(process_memory.of(self._process.pid) - self._bare, 0)

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
        self._bare = process_memory.of(process.pid)
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
