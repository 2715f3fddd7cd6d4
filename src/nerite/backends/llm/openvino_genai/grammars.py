"""Grammars are tried before the pipeline sees them: one that cannot be compiled would fail each of its steps, for all.

A thread tries them one after the other, so that requests without a new grammar need not wait for it. What is compiled
stays with a pipeline's tokenizer for as long as there is one. So there has to be another one at times.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection
from sys import getsizeof
from typing import Final

from nerite.backends.llm.openvino_genai.compiling import CompilerProcess
from nerite.backends.llm.openvino_genai.options import Options
from nerite.backends.llm.structured import Grammar
from nerite.backends.openvino.framework import openvino
from nerite.core.byte_budget import GRAMMARS, Memo
from nerite.core.errors import Internal, InvalidArgument, NeriteError

_log = logging.getLogger("nerite.backends.llm")
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

    def __init__(self, options: Options, compile: Callable[[Grammar, Collection[int], int], str]) -> None:
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
