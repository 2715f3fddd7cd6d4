"""Open programs of all kinds behind one interface; also the import of PyTorch, and its errors."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from nerite.backends.arrays.graph import GraphTensor
from nerite.backends.machine import importing, translating
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.tensor import DataType

TensorPath: TypeAlias = tuple[str | int, ...]
"""Path into a nested result: keys of dictionaries, positions in tuples. Empty for a single tensor."""
Call: TypeAlias = Callable[[list[Any]], Any]
"""Computes a result from values in a fixed order. Raises what PyTorch raises."""


class TensorSlot(NamedTuple):
    """Input or output of a program: a tensor, or a list of strings."""

    name: str
    """Name in a configuration that is completed from the program."""
    aliases: tuple[str, ...] = ()
    """Other names that a configuration may use, besides ``<any name>__<position>``."""
    datatype: DataType | None = None
    """None if the program does not know it."""
    dims: tuple[int, ...] | None = None
    """The full shape, -1 for any size; None if the program does not know it."""
    text: bool | None = False
    """True for a list of strings; None if the program does not know."""
    optional: bool = False
    """True for an input that may be omitted."""
    path: TensorPath = ()
    """Path to an output in the result of a call."""

    def as_tensor(self, name: str) -> GraphTensor | None:
        """Return the tensor as ``name``; None if the program does not know type and shape."""
        if self.datatype is None or self.dims is None:
            return None
        return GraphTensor(name, self.datatype, self.dims)


@dataclass(frozen=True)
class Program:
    """Model that is open on one device."""

    inputs: tuple[TensorSlot, ...] | None
    """None: the inputs of the configuration, by its names."""
    outputs: tuple[TensorSlot, ...] | None
    """None: unknown before the program has run."""
    bind: Callable[[Sequence[str]], Call]
    """Returns the function that computes from values for these inputs, which have the program's own names."""
    device: str
    """Device of its inputs."""
    writes_inputs: bool = False
    """True if it may write into its inputs."""
    keeps_state: bool = False
    """True if it may change itself when it runs, including tensors that it has returned."""
    highest_batch: int | None = None
    """Maximum of the first dimension; None without a limit."""


def path_text(path: TensorPath) -> str:
    """Return a path as Triton writes it: ``[key][0]``."""
    return "".join(f"[{step}]" for step in path)


def program_output(position: int, path: TensorPath, **what: Any) -> TensorSlot:
    """Return an output with the names that follow from its position and path; ``what`` has the other fields."""
    alone = len(path) == 1 and isinstance(path[0], str)
    return TensorSlot(
        str(path[0]) if alone else f"OUTPUT__{position}", (f"RESULT{path_text(path)}",), path=path, **what
    )


# The import of PyTorch, and its exceptions.

_log = logging.getLogger("nerite.frameworks.pytorch")

_VARIABLES: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Makes threads sleep while they wait. If they spin while other processes need the cores, each operation waits for
them: with two threads on two busy cores, twenty layers took 2 ms instead of 12 to 58, with a tenth of the CPU time."""


@cache
def load_torch() -> None:
    """Import PyTorch. Slow, once. Raises ``NotInstalled`` if it cannot be imported."""
    with _environment(), importing("torch", "torch"):
        import torch
    with quiet:
        # It warns once per process of read-only memory, such as a received request. Programs that write get a copy.
        torch.from_numpy(np.frombuffer(bytes(4), np.float32))


class _Quiet:
    """Suppresses the warnings of PyTorch.

    Filters apply to all threads: the first one that enters sets them, the last one that leaves restores them.
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
"""Used while a model is loaded."""


def use_inter_op_threads(model: str, count: int) -> None:
    """Make TorchScript use ``count`` threads between operations, unless it is too late: it can be set once."""
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


def loading(model: str, remedy: str = "") -> AbstractContextManager[None]:
    """Return a context that translates exceptions of opening a model into ``Internal``, with a remedy."""
    hint = f". {remedy}" if remedy else ""
    return translating(lambda error: Internal(f"failed to load model '{model}': {_text(error)}{hint}"))


def run_error(error: Exception) -> NeriteError:
    """Translate an exception of a computation into the error for clients."""
    kind = InvalidArgument if isinstance(error, AssertionError) else Internal
    return kind(f"PyTorch execute failure: {_text(error)}")


def _text(error: Exception) -> str:
    """Return the text of an exception without the C++ stack that may follow it."""
    text = str(error).partition("\nException raised from ")[0].strip()
    return text or type(error).__name__


@contextmanager
def _environment() -> Iterator[None]:
    """Set unset variables that libraries read when they are loaded; child processes do not inherit them."""
    ours = {key: value for key, value in _VARIABLES.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            del os.environ[key]
