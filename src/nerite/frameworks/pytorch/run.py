"""One instance's way to compute with a program: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from nerite.backends.arrays.batches import SMALL
from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.configuration import TensorPort
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import CALLS, Memo
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Array, DataType
from nerite.frameworks.pytorch import artifact
from nerite.frameworks.pytorch.artifact import TorchPlan
from nerite.frameworks.pytorch.program import Call, Program, TensorPath, TensorSlot, failed_run, program_output

# Between numpy's arrays and PyTorch's tensors: views, where nobody writes and everything is in its place.

Take: TypeAlias = Callable[[Array], Any]
"""Makes of an input what the program is given."""

TORCH: Final[dict[DataType, torch.dtype]] = {
    dtypes.BOOL: torch.bool,
    dtypes.UINT8: torch.uint8,
    dtypes.UINT16: torch.uint16,
    dtypes.UINT32: torch.uint32,
    dtypes.UINT64: torch.uint64,
    dtypes.INT8: torch.int8,
    dtypes.INT16: torch.int16,
    dtypes.INT32: torch.int32,
    dtypes.INT64: torch.int64,
    dtypes.FP16: torch.float16,
    dtypes.FP32: torch.float32,
    dtypes.FP64: torch.float64,
    dtypes.BF16: torch.bfloat16,
}
DATATYPES: Final = {kind: datatype for datatype, kind in TORCH.items()}


def taker(datatype: DataType, *, copied: bool, device: str) -> Take:
    """Return what makes tensors of arrays of this type. ``copied``: the program may write into them."""
    if datatype is dtypes.BYTES:
        return _strings

    def take(array: Array) -> torch.Tensor:
        # A tensor in the middle of a message begins where it likes; what computes expects it at a multiple of its size.
        return torch.from_numpy(array.copy() if copied or not array.flags.aligned else array)

    def narrow(array: Array) -> torch.Tensor:
        return take(array).view(torch.bfloat16)

    cpu = narrow if datatype is dtypes.BF16 else take
    if device in ("", "cpu"):
        return cpu
    return lambda array: cpu(array).to(device, non_blocking=True)


def give(port: TensorPort, value: Any, inputs: Sequence[Any], *, copied: bool) -> Array:
    """Return an output as an array: a view, if nobody will write there while it is sent.

    ``inputs`` are those that it was computed from, whose memory may be used again. ``copied``: the program may write
    into what it has given out. Raises ``InvalidArgument`` where it is not what the configuration says.
    """
    if not isinstance(value, torch.Tensor):
        return _text(port, value)
    expected = TORCH.get(port.datatype)
    if value.dtype is not expected:
        raise _wrong_type(port, str(DATATYPES[value.dtype].name if value.dtype in DATATYPES else value.dtype))
    tensor = (value.detach() if value.requires_grad else value).cpu().contiguous()
    # What is smaller is copied into the response.
    if tensor.nbytes > SMALL and (copied or _is_shared(tensor, inputs)):
        tensor = tensor.clone()
    array: Array = tensor.view(torch.uint16).numpy() if expected is torch.bfloat16 else tensor.numpy()
    return _shaped(port, array)


def _is_shared(tensor: torch.Tensor, inputs: Sequence[Any]) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return any(isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == storage for each in inputs)


def _shaped(port: TensorPort, array: Array) -> Array:
    # A configuration cannot declare a scalar without its reshape; what it declares instead has one element, too.
    return array.reshape(1) if not array.ndim and port.model_dims == (1,) and not port.batching else array


def _strings(array: Array) -> list[Any]:
    texts: list[Any] = array.reshape(-1).tolist()
    return texts


def _text(port: TensorPort, value: Any) -> Array:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise InvalidArgument(
            f"output '{port.name}' must be of type Tensor or List[str], received {type(value).__name__}. Return "
            "tensors, lists of strings, and tuples or dictionaries of them"
        )
    if port.datatype is not dtypes.BYTES:
        raise _wrong_type(port, dtypes.BYTES.name)
    array = np.array(value, object)
    return array.reshape(-1, 1) if port.batching and port.model_dims == (1,) else array


def _wrong_type(port: TensorPort, provided: str) -> InvalidArgument:
    known = dtypes.BY_NAME.get(provided)
    return InvalidArgument(
        f"configuration expects datatype TYPE_{port.datatype.name} for output '{port.name}', model provides "
        f"TYPE_{provided}. {f'Set data_type: {known.config_name}' if known else 'The protocol has no such type'}"
    )


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
    paths: Mapping[str, TensorPath] | None
    """To each output; None where that is not known before the program has run."""


class _Bound(NamedTuple):
    """A program and those of its inputs that are there, in the order in which it takes them."""

    takes: tuple[tuple[str, Take], ...]
    call: Call


class ProgramRun:
    """Computes with a program that other instances may be using, too. For one thread at a time."""

    def __init__(self, model: str, program: Program, ends: Ends, plan: TorchPlan, threads: int) -> None:
        self._model = model
        self._program = program
        self._ends = ends
        self._plan = plan
        self._threads = threads
        self._takers = {
            name: taker(datatype, copied=program.writes_inputs, device=program.device)
            for name, datatype in ends.datatypes.items()
        }
        self._bounds: Memo[frozenset[str], _Bound] = Memo()
        self._all = self._bound(frozenset(ends.inputs))
        self._paths = ends.paths
        self._settings = [(_SETTERS[key], value) for key, value in plan.switches]
        if not plan.optimized:
            self._settings.append((torch._C._set_graph_executor_optimize, False))
        self._stream = torch.cuda.Stream(program.device) if program.device.startswith("cuda") else None

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
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
                return [give(port, _at(result, paths[port.name]), values, copied=copied) for port in selection.ports]
        except Exception as error:  # Whatever the framework or the model's code raises says what went wrong.
            raise failed_run(error) from error

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


def paths_of(model: str, slots: Sequence[TensorSlot], names: Sequence[str]) -> dict[str, TensorPath]:
    """Return the way to each output, by the configuration's names. Raises ``InvalidArgument`` for one there is not."""
    return {name: slot.path for name, slot in artifact.output_names(model, names, slots).items()}


def _slots(result: Any) -> list[TensorSlot]:
    return [program_output(position, path, text=None) for position, path in enumerate(_leaves(result))]


def _leaves(value: Any, path: TensorPath = ()) -> Iterator[TensorPath]:
    """Yield the paths of all that is no dictionary and no list or tuple of other things than strings."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    elif isinstance(value, (list, tuple)) and not (value and all(isinstance(each, str) for each in value)):
        for position, each in enumerate(value):
            yield from _leaves(each, (*path, position))
    else:
        yield path


def _at(result: Any, path: TensorPath) -> Any:
    for step in path:
        result = result[step]
    return result
