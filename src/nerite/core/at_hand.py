"""The requests that the running code is about: for whoever writes a line while one is executed.

A context variable, so that coroutines which a model starts keep theirs while other batches run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Final

from nerite.core.request import InferenceRequest

at_hand: Final[ContextVar[Sequence[InferenceRequest]]] = ContextVar("at_hand", default=())
"""Set while a batch is executed."""
_MOST: Final = 8
"""Ids that are told of a batch."""


def ids_of(requests: Iterable[InferenceRequest]) -> str:
    """Return the ids of requests as one text, some of them if there are many; nothing if none has one."""
    ids = [request.id for request in requests if request.id]
    return ", ".join([*ids[:_MOST], "…"] if len(ids) > _MOST else ids)


def ids_at_hand() -> str:
    """Return the ids of the requests that the running code is about."""
    return ids_of(at_hand.get())
