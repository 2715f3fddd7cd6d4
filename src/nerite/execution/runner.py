"""Something that runs batches of one model: an instance, wherever it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from nerite.core.errors import NeriteError
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse

Batch: TypeAlias = list[InferenceRequest]

Done: TypeAlias = Callable[["Runner", Batch, Sequence[InferenceResponse], Marks | None], None]
"""Called on the loop's thread with one answer a request. ``Marks`` is None if the model never got to run."""


class Runner(Protocol):
    """An instance of a model. Idle until ``run``, and again when it has called back.

    With ``ahead`` it takes a second batch while the first runs, and starts it when that ends.

    ``usable`` is False while it cannot take a batch, though nothing runs in it (a worker that restarts);
    ``on_usable`` is called whenever that changes, and when an attempt to restart it failed. ``failure`` says why the
    last such attempt failed, and is None if it did not. ``restarts`` counts those that succeeded.
    """

    name: str
    ahead: bool
    usable: bool
    failure: NeriteError | None
    restarts: int
    done: Done
    on_usable: Callable[[Runner], None]

    def run(self, batch: Batch) -> None:
        """Execute a batch, and call ``done`` once. Never blocks, except where running on the loop is the idea."""

    def is_ready(self, answered: Callable[[bool], None]) -> None:
        """Ask the model itself whether it can serve; ``answered`` is called on the loop's thread."""

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model and give everything back; ``closed`` is called once, on the loop's thread."""
