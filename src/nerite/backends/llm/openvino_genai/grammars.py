"""Grammars are tried before the pipeline sees them: one that cannot be compiled would fail each of its steps, for all.

A thread tries them one after the other, so that requests without a new grammar need not wait for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import Final

from nerite.backends.llm.openvino_genai.compiling import CompilerProcess
from nerite.backends.llm.openvino_genai.options import Options
from nerite.backends.llm.structured import Grammar
from nerite.backends.openvino.framework import openvino
from nerite.core.errors import Internal, InvalidArgument, NeriteError

_log = logging.getLogger("nerite.backends.llm")
_MOST: Final = 4096
"""Grammars that are known to be good or bad."""

_Key = tuple[Grammar, frozenset[int]]


class Grammars:
    """Tries grammars. May be used from any thread."""

    def __init__(self, options: Options, compile: Callable[[Grammar, Collection[int], int], str]) -> None:
        """``compile`` has one compiled where it is used, and returns what is wrong with it. Raises ``NeriteError``."""
        self._options = options
        self._compile = compile
        self._lock = threading.Lock()
        self._tried: dict[_Key, str] = {}
        """What is wrong with each; empty where nothing is."""
        self._vocabulary = 0
        """How many tokens the model knows; 0 until it was looked for."""
        self._asked: queue.SimpleQueue[tuple[_Key, Callable[[NeriteError | None], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._apart: CompilerProcess | None = None

    def known(self, grammar: Grammar, ends: Collection[int]) -> bool:
        """Return whether a text of this form, which one of the tokens ``ends`` ends, is known to be possible.

        Raises ``InvalidArgument`` if it is known that it is not.
        """
        if not self._vocabulary:
            logits = openvino().Core().read_model(self._options.model).output("logits")
            self._vocabulary = logits.get_partial_shape()[2].get_length()
        if max(ends) >= self._vocabulary:  # the framework would write where it must not
            raise InvalidArgument(f"'stop_token_ids' has {max(ends)}, and the vocabulary {self._vocabulary} tokens")
        wrong = self._tried.get((grammar, frozenset(ends)))
        if wrong:
            raise _refusal(grammar, wrong)
        return wrong is not None

    def find_out(self, grammar: Grammar, ends: Collection[int], then: Callable[[NeriteError | None], None]) -> None:
        """Try a grammar, and tell ``then`` what is wrong with it, if anything is. On a thread of its own."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        self._asked.put(((grammar, frozenset(ends)), then))

    def close(self) -> None:
        """End the thread, after what it tries just now."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
        if self._apart is not None:
            self._apart.close()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            key, then = asked
            try:
                wrong = self._tried.get(key)
                if wrong is None:
                    if len(self._tried) >= _MOST:
                        self._tried.clear()
                    wrong = self._tried[key] = self._wrong(*key)
                then(_refusal(key[0], wrong) if wrong else None)
            except Exception as error:
                _log.exception("'%s': a grammar could not be tried", self._options.name)
                then(Internal(f"structured output ({key[0].kind}) could not be tried: {error}"))

    def _wrong(self, grammar: Grammar, ends: Collection[int]) -> str:
        if self._apart is None:
            self._apart = CompilerProcess(self._vocabulary, self._options.directory)
        if wrong := self._apart.wrong(grammar, ends):
            return wrong
        return self._compile(grammar, ends, self._vocabulary)


def _refusal(grammar: Grammar, wrong: str) -> NeriteError:
    return InvalidArgument(f"structured output ({grammar.kind}): {wrong}")
