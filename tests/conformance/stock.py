"""NVIDIA's four Python clients behind one face that notes which of their methods were used, and what uses them.

An exercise is a function that uses one public method against a real server; ``exercises/`` has them by topic, and
``test_tritonclient.py`` runs each with each kind of client that has the method.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from serving import Serving

KINDS = ("http", "http.aio", "grpc", "grpc.aio")
HTTP, GRPC = KINDS[:2], KINDS[2:]
EVERYWHERE = {"headers": {"x-asked-by": "an-exercise"}, "query_params": {"asked": "by an exercise"}}
"""What is given besides to each call that may be given it."""


def module_of(kind: str) -> ModuleType:
    return importlib.import_module(f"tritonclient.{kind}")


def public_methods(kind: str) -> dict[str, inspect.Signature]:
    """Return the public methods of a kind of client, as it is installed."""
    members = inspect.getmembers(module_of(kind).InferenceServerClient, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in members if not name.startswith("_")}


class StockClient:
    """A client of one kind. Its methods are called plainly, also those that are coroutines."""

    def __init__(self, kind: str, server: Serving) -> None:
        self.kind = kind
        self.server = server
        self.is_grpc = kind in GRPC
        self.used: set[str] = set()
        # The clients for asyncio name no classes for tensors: they use those of the others.
        self.tensors: Any = module_of(kind.removesuffix(".aio"))
        self._methods = public_methods(kind)
        self._loop = asyncio.new_event_loop()
        self._client = self.wait(self._made(server.grpc if self.is_grpc else server.http))

    async def _made(self, url: str) -> Any:
        return module_of(self.kind).InferenceServerClient(url)

    def wait(self, result: Any) -> Any:
        """Return what an awaitable brings, and anything else as it is."""
        return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method, signature = getattr(self._client, name), self._methods[name]

        def call(*arguments: Any, **options: Any) -> Any:
            self.used.add(name)
            # Copied, because the clients for HTTP write headers of their own into what they are given.
            besides = {key: dict(value) for key, value in EVERYWHERE.items() if key in signature.parameters}
            return self.wait(method(*arguments, **{**besides, **options}))

        return call

    def told(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method that tells something, and return it as JSON would have it."""
        return getattr(self, name)(*arguments, **({"as_json": True} if self.is_grpc else {}), **options)

    def refused(self, name: str, *arguments: Any, **options: Any) -> tuple[str, str]:
        """Call a method that has to fail, and return status and text of the exception."""
        with pytest.raises(InferenceServerException) as failed:
            getattr(self, name)(*arguments, **options)
        return str(failed.value.status()).removeprefix("StatusCode."), failed.value.message()

    def tensor(self, name: str, array: np.ndarray[Any, Any], **options: Any) -> Any:
        """Return an input with its data; ``options`` are those of ``set_data_from_numpy``."""
        made = self.tensors.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        return made.set_data_from_numpy(array, **options)

    @contextmanager
    def another(self) -> Iterator[StockClient]:
        """Yield a second client of the same kind, whose methods count as this one's."""
        other = StockClient(self.kind, self.server)
        other.used = self.used
        try:
            yield other
        finally:
            other.end()

    def end(self) -> None:
        """Close the client. Closing is itself a method that may have been used."""
        self.wait(self._client.close())
        self._loop.close()


@dataclass(frozen=True)
class Exercise:
    """A use of one method by some kinds of client."""

    method: str
    kinds: tuple[str, ...]
    play: Callable[[StockClient], None]


EXERCISES: list[Exercise] = []


def exercise(method: str, *kinds: str) -> Callable[[Callable[[StockClient], None]], Callable[[StockClient], None]]:
    """Mark a function as a use of ``method``, for the clients of some kinds, or of all that have it."""

    def mark(play: Callable[[StockClient], None]) -> Callable[[StockClient], None]:
        having = tuple(kind for kind in kinds or KINDS if method in public_methods(kind))
        EXERCISES.append(Exercise(method, having, play))
        return play

    return mark


def exercises() -> list[Exercise]:
    """All exercises, those of one topic one after the other."""
    for path in sorted((Path(__file__).parent / "exercises").glob("*.py")):
        importlib.import_module(f"conformance.exercises.{path.stem}")
    return EXERCISES
