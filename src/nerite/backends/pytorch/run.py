"""One instance's way to compute with a program: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch

from nerite.backends.arrays.selection import Selection
from nerite.backends.pytorch import naming, tensors
from nerite.backends.pytorch.framework import failed
from nerite.backends.pytorch.plan import Plan
from nerite.backends.pytorch.program import Call, Path, Program, Slot, output
from nerite.core.byte_budget import CALLS, Memo
from nerite.core.dtype import DataType
from nerite.core.tensor import Array

_BOUND: Final = 2048
_TAKEN: Final = 256
"""Bytes that a bound program takes in memory, and each input of it."""
_SETTERS: Final[dict[str, Callable[[bool], object]]] = {
    "ENABLE_JIT_EXECUTOR": torch._C._jit_set_profiling_executor,
    "ENABLE_JIT_PROFILING": torch._C._jit_set_profiling_mode,
    "ENABLE_TENSOR_FUSER": torch._C._jit_set_texpr_fuser_enabled,
}


class Ends(NamedTuple):
    """Where a configuration and a program meet."""

    inputs: Mapping[str, str]
    """The program's name of each input, by the configuration's, in the program's order."""
    datatypes: Mapping[str, DataType]
    """Of each input, by the configuration's name."""
    outputs: Sequence[str]
    """The configuration's names."""
    paths: Mapping[str, Path] | None
    """To each output; None where that is not known before the program has run."""


class _Bound(NamedTuple):
    """A program and those of its inputs that are there, in the order in which it takes them."""

    takes: tuple[tuple[str, tensors.Take], ...]
    call: Call


class Run:
    """Computes with a program that other instances may be using, too. For one thread at a time."""

    def __init__(self, model: str, program: Program, ends: Ends, plan: Plan, threads: int) -> None:
        self._model = model
        self._program = program
        self._ends = ends
        self._plan = plan
        self._threads = threads
        self._takers = {
            name: tensors.taker(datatype, copied=program.writes_inputs, device=program.device)
            for name, datatype in ends.datatypes.items()
        }
        self._bounds: Memo[frozenset[str], _Bound] = Memo()
        self._all = self._bound(frozenset(ends.inputs))
        self._paths = ends.paths
        self._settings = [(_SETTERS[key], value) for key, value in plan.switches]
        if not plan.optimized:
            self._settings.append((torch._C._set_graph_executor_optimize, False))
        self._stream = torch.cuda.Stream(program.device) if program.device.startswith("cuda") else None

    def __call__(self, selection: Selection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Compute the outputs of ``selection``. Raises ``NeriteError``."""
        bound = self._all
        if len(inputs) != len(bound.takes):
            bound = self._bound(frozenset(inputs))
        # Each time: it is for the thread, which changes, and for libraries that have one number for all threads.
        torch.set_num_threads(self._threads)
        for setter, value in self._settings:
            setter(value)
        try:
            with self._device(), torch.inference_mode() if self._plan.inference_mode else torch.no_grad():
                values = [take(inputs[name]) for name, take in bound.takes]
                result = bound.call(values)
                paths = self._paths
                if paths is None:
                    paths = self._paths = paths_of(self._model, _slots(result), self._ends.outputs)
                copied = self._program.keeps_state
                return [
                    tensors.give(port, _at(result, paths[port.name]), values, copied=copied) for port in selection.ports
                ]
        except Exception as error:  # Whatever the framework or the model's code raises says what went wrong.
            raise failed(error) from error

    def _bound(self, names: frozenset[str]) -> _Bound:
        """Return the program as it is called where these inputs are there; optional ones may be away."""
        if (bound := self._bounds.get(names)) is None:
            ordered = [name for name in self._ends.inputs if name in names]
            takes = tuple((name, self._takers[name]) for name in ordered)
            call = self._program.bind([self._ends.inputs[name] for name in ordered])
            bound = _Bound(takes, call)
            CALLS.put(self._bounds, names, bound, _BOUND + _TAKEN * len(takes))
        return bound

    def _device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else self._gpu()

    @contextmanager
    def _gpu(self) -> Iterator[None]:
        torch.backends.cudnn.enabled = self._plan.cudnn
        with torch.cuda.stream(self._stream):
            yield
        if self._plan.clean_cache:
            torch.cuda.empty_cache()


def paths_of(model: str, slots: Sequence[Slot], names: Sequence[str]) -> dict[str, Path]:
    """Return the way to each output, by the configuration's names. Raises ``InvalidArgument`` for one there is not."""
    return {name: slot.path for name, slot in naming.outputs(model, names, slots).items()}


def _slots(result: Any) -> list[Slot]:
    return [output(position, path, text=None) for position, path in enumerate(_leaves(result))]


def _leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all that is no dictionary and no list or tuple of other things than strings."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    elif isinstance(value, (list, tuple)) and not (value and all(isinstance(each, str) for each in value)):
        for position, each in enumerate(value):
            yield from _leaves(each, (*path, position))
    else:
        yield path


def _at(result: Any, path: Path) -> Any:
    for step in path:
        result = result[step]
    return result
