"""Grammars are compiled before the pipeline sees them: one that cannot be would fail each of its steps, for all.

The framework compiles with the first token that is chosen, and remembers what it compiled with the tokenizer. So a
second pipeline with that tokenizer and with a model that knows nothing chooses one token: either it says what is wrong
with the grammar, or the first pipeline finds it compiled.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np

from nerite.backends.llm.openvino_genai import framework
from nerite.backends.llm.openvino_genai.options import MODEL, Options
from nerite.backends.llm.structured import Grammar
from nerite.backends.openvino.framework import openvino
from nerite.core.errors import InvalidArgument

_PLACE: Final = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""What stands before the words that matter."""
_MOST: Final = 4096
"""Grammars that are known to be good or bad."""


class Grammars:
    """Tries grammars. May be used from any thread."""

    def __init__(self, options: Options, tokenizer: Any) -> None:
        self._file = options.model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._pipeline: Any = None
        self._vocabulary = 0
        """How many tokens the model knows; 0 until it was looked for."""
        self._tried: dict[tuple[Grammar, frozenset[int]], str] = {}
        """What is wrong with each; empty where nothing is."""

    def check(self, grammar: Grammar, ends: Collection[int]) -> None:
        """Raise ``InvalidArgument`` if a text of this form, which one of the tokens ``ends`` ends, cannot be."""
        key = grammar, frozenset(ends)
        with self._lock:
            wrong = self._tried.get(key)
            if wrong is None:
                if len(self._tried) >= _MOST:
                    self._tried.clear()
                wrong = self._tried[key] = self._try(grammar, ends)
        if wrong:
            raise InvalidArgument(f"structured output ({grammar.kind}): {wrong}")

    def _try(self, grammar: Grammar, ends: Collection[int]) -> str:
        if not self._vocabulary:
            logits = openvino().Core().read_model(self._file).output("logits")
            self._vocabulary = logits.get_partial_shape()[2].get_length()
        if max(ends) >= self._vocabulary:  # the framework would write where it must not
            return f"'stop_token_ids' has {max(ends)}, and the vocabulary {self._vocabulary} tokens"
        if self._pipeline is None:
            self._pipeline = self._made()
        config = framework.genai().GenerationConfig()
        config.max_new_tokens = 1
        config.stop_token_ids = set(ends)
        config.structured_output_config = framework.structured(grammar)
        try:
            self._pipeline.generate(openvino().Tensor(np.zeros((1, 1), np.int64)), config)
        except Exception as error:  # whatever it is, it would be the same in the other pipeline
            return _PLACE.sub("", " ".join(str(error).split())) or type(error).__name__
        return ""

    def _made(self) -> Any:
        """Return a pipeline that finds all tokens equally likely."""
        ov = openvino()
        with tempfile.TemporaryDirectory(prefix="nerite-") as folder:
            file = Path(folder) / MODEL
            ov.save_model(_indifferent(self._vocabulary), file, compress_to_fp16=False)
            text, weights = file.read_text(), file.with_suffix(".bin").read_bytes()
        return framework.genai().LLMPipeline(
            text, ov.Tensor(np.frombuffer(weights, np.uint8)), self._tokenizer, "CPU", ATTENTION_BACKEND="SDPA"
        )


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
