"""The import of PyTorch, once and in the right surroundings, and what its exceptions mean."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import numpy as np

from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotHere

_log = logging.getLogger("nerite.backends.pytorch")

_WAITING: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads sleep while they wait. Where they spin, and something else wants the cores, each operation waits for them:
measured with two threads on two busy cores, twenty layers took 2 ms instead of 12 to 58, with a tenth of the work."""


@cache
def load() -> None:
    """Import PyTorch. Slow, once. Raises ``Unsupported`` where it cannot be imported."""
    with _environment():
        try:
            import torch
        except (ImportError, OSError) as error:
            raise NotHere(f"unable to import torch ({error}): pip install 'nerite[torch]'") from error
    with quiet:
        # It warns once in a process of memory that it may read only, as a received request is. Who writes gets a copy.
        torch.from_numpy(np.frombuffer(bytes(4), np.float32))


class _Quiet:
    """Keeps PyTorch from warning of what we know.

    Filters are for all threads: the first to come in sets them, the last to leave takes them back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._filters.__exit__(None, None, None)


quiet: Final = _Quiet()
"""Around what loads a model."""


def use_inter_op_threads(model: str, count: int) -> None:
    """Have TorchScript use ``count`` threads between operations, if nobody has said otherwise: it can be said once."""
    import torch

    if not count or torch.get_num_interop_threads() == count:
        return
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError:
        _log.warning(
            "INTER_OP_THREAD_COUNT of model '%s' is %d, and stays %d: it is for all models of a server, and can be set "
            "by the first one, before any has been executed",
            model,
            count,
            torch.get_num_interop_threads(),
        )


def unloadable(model: str, error: Exception, remedy: str = "") -> NeriteError:
    """Return what is said where a model cannot be opened."""
    if isinstance(error, NeriteError):
        return error
    return Internal(f"failed to load model '{model}': {_said(error)}{f'. {remedy}' if remedy else ''}")


def failed(error: Exception) -> NeriteError:
    """Return what is said where a batch cannot be computed."""
    if isinstance(error, NeriteError):
        return error
    kind = InvalidArgument if isinstance(error, AssertionError) else Internal
    return kind(f"PyTorch execute failure: {_said(error)}")


def _said(error: Exception) -> str:
    """Return the text of an exception without the stack of C++ that some have behind it."""
    text = str(error).partition("\nException raised from ")[0].strip()
    return text or type(error).__name__


@contextmanager
def _environment() -> Iterator[None]:
    """Set what libraries read when they are loaded, unless somebody has; not for the processes that we start."""
    ours = {key: value for key, value in _WAITING.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            del os.environ[key]
