"""An answer while it comes, and what there is to say of it at its end."""

from __future__ import annotations

from collections.abc import Callable, Generator

from nerite.client.completion import Part

_VISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""A model may write anything, and what steers a terminal is not for it to write."""


class Answer:
    """Listens to a model until it is done, or until Ctrl-C."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._first = self._last = 0.0
        self.text = ""
        self.finish_reason = ""
        self.interrupted = False
        self._prompt_tokens: int | None = None
        self._tokens: int | None = None

    def listen(self, parts: Generator[Part], say: Callable[[str], None]) -> None:
        """Give ``say`` the text as it comes. Ctrl-C ends the answer, here and at the server.

        Raises what ``parts`` and ``say`` raise; the server is told then, too.
        """
        try:
            for part in parts:
                self._take(part)
                if part.text:
                    say(part.text)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            parts.close()
            self._last = self._clock()

    @property
    def cut_off(self) -> bool:
        """Whether the model would have gone on."""
        return self.finish_reason == "length"

    def figures(self) -> str:
        """Return how many tokens there were, and how fast they came, as far as that is known."""
        seconds = self._last - self._began
        told = [f"{self._tokens} tokens in {seconds:.2f} s" if self._tokens is not None else f"{seconds:.2f} s"]
        if self.text:
            told.append(f"the first after {self._first - self._began:.2f} s")
        if self._tokens is not None and self._tokens > 1 and self._last > self._first:
            told.append(f"then {(self._tokens - 1) / (self._last - self._first):.1f} a second")
        if self._prompt_tokens is not None:
            told.append(f"prompt of {self._prompt_tokens}")
        return ", ".join(told)

    def _take(self, part: Part) -> None:
        if part.text and not self.text:
            self._first = self._clock()
        self.text += part.text
        self.finish_reason = part.finish_reason or self.finish_reason
        if part.completion_tokens is not None:
            self._tokens, self._prompt_tokens = part.completion_tokens, part.prompt_tokens


def for_terminal(text: str) -> str:
    """Return text as it may be shown at a terminal."""
    return text.translate(_VISIBLE)
