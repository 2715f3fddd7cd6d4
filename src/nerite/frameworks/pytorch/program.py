"""What a model that is open can be asked to do, whichever kind it is. No framework is needed to read this."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from nerite.backends.arrays.graph import GraphTensor
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotInstalled
from nerite.core.tensor import DataType

TensorPath: TypeAlias = tuple[str | int, ...]
"""The way into a nested result: keys of dictionaries, positions in tuples. Empty for a single tensor."""
Call: TypeAlias = Callable[[list[Any]], Any]
"""Computes a result from values in a fixed order. Raises what PyTorch raises."""


class TensorSlot(NamedTuple):
    """One tensor, or list of strings, that a program takes or gives."""

    name: str
    """What a configuration calls it if the program has the say."""
    aliases: tuple[str, ...] = ()
    """Other names, besides ``<any name>__<position>``."""
    datatype: DataType | None = None
    """None where the program does not say."""
    dims: tuple[int, ...] | None = None
    """All of the shape, -1 for any size; None where the program does not say."""
    text: bool | None = False
    """A list of strings; None where the program does not say."""
    optional: bool = False
    """An input that may be left out."""
    path: TensorPath = ()
    """To an output, in what a call returns."""

    def as_tensor(self, name: str) -> GraphTensor | None:
        """Return what the program says of it, as ``name``; None if it says nothing."""
        if self.datatype is None or self.dims is None:
            return None
        return GraphTensor(name, self.datatype, self.dims)


@dataclass(frozen=True)
class Program:
    """A model on one device."""

    inputs: tuple[TensorSlot, ...] | None
    """None: as many as the configuration has, by its names."""
    outputs: tuple[TensorSlot, ...] | None
    """None: nobody knows before it has run."""
    bind: Callable[[Sequence[str]], Call]
    """Return what computes from values for these inputs, by the program's own names, in this order."""
    device: str
    """Where it wants its inputs."""
    writes_inputs: bool = False
    """It may write into its inputs."""
    keeps_state: bool = False
    """It may change itself when it runs, and give out what it will change later."""
    highest_batch: int | None = None
    """What the first dimension may be at most; None: anything."""


def describe_program(path: TensorPath) -> str:
    """Return a path as Triton writes it: ``[key][0]``."""
    return "".join(f"[{step}]" for step in path)


def program_output(position: int, path: TensorPath, **what: Any) -> TensorSlot:
    """Return the output at ``position`` of all, with the names that its path gives it and ``what`` is known of it."""
    alone = len(path) == 1 and isinstance(path[0], str)
    return TensorSlot(
        str(path[0]) if alone else f"OUTPUT__{position}", (f"RESULT{describe_program(path)}",), path=path, **what
    )


# The import of PyTorch, once and in the right surroundings, and what its exceptions mean.

_log = logging.getLogger("nerite.frameworks.pytorch")

_WAITING: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads sleep while they wait. Where they spin, and something else wants the cores, each operation waits for them:
measured with two threads on two busy cores, twenty layers took 2 ms instead of 12 to 58, with a tenth of the work."""


@cache
def load_torch() -> None:
    """Import PyTorch. Slow, once. Raises ``Unsupported`` where it cannot be imported."""
    with _environment():
        try:
            import torch
        except (ImportError, OSError) as error:
            raise NotInstalled(f"unable to import torch ({error}): pip install 'nerite[torch]'") from error
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


def failed_run(error: Exception) -> NeriteError:
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
