"""Computes with a program for one instance: converts numpy arrays to tensors, runs it, and converts the result back."""

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
from nerite.frameworks.pytorch.artifact import Binding, TorchPlan
from nerite.frameworks.pytorch.program import Call, Program, TensorPath, program_output

# Conversion between arrays and tensors: views, unless a program may write into them or they are misaligned.

ToTensor: TypeAlias = Callable[[Array], Any]
"""Converts an input to what the program takes."""

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


def to_tensor(datatype: DataType, *, copied: bool, device: str) -> ToTensor:
    """Return the function that converts arrays of a type. ``copied``: the program may write into its inputs."""
    if datatype is dtypes.BYTES:
        return strings

    def view(array: Array) -> torch.Tensor:
        # A tensor in a message may start at any address; kernels expect a multiple of the element size.
        return torch.from_numpy(array.copy() if copied or not array.flags.aligned else array)

    def narrow(array: Array) -> torch.Tensor:
        return view(array).view(torch.bfloat16)

    cpu = narrow if datatype is dtypes.BF16 else view
    if device in ("", "cpu"):
        return cpu
    return lambda array: cpu(array).to(device, non_blocking=True)


def to_array(port: TensorPort, value: Any, inputs: Sequence[Any], *, copied: bool) -> Array:
    """Return an output as an array: a view, if its memory is not overwritten while it is sent.

    The memory of ``inputs`` is reused by the next batch. ``copied``: the program may later write into its outputs.
    Raises ``InvalidArgument`` if the output is not what the configuration declares.
    """
    if not isinstance(value, torch.Tensor):
        return _text(port, value)
    check_type(port, value.dtype)
    tensor = (value.detach() if value.requires_grad else value).cpu().contiguous()
    # Smaller outputs are copied into the response anyway.
    if tensor.nbytes > SMALL and (copied or is_shared(tensor, inputs)):
        tensor = tensor.clone()
    array: Array = tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    return array.reshape(1) if is_declared_scalar(port, array.ndim) else array


def check_type(port: TensorPort, dtype: torch.dtype) -> None:
    """Raise ``InvalidArgument`` if an output has another type than the configuration declares."""
    if dtype is not TORCH.get(port.datatype):
        raise _wrong_type(port, str(DATATYPES[dtype].name if dtype in DATATYPES else dtype))


def is_shared(tensor: torch.Tensor, inputs: Sequence[Any]) -> bool:
    """Return whether a tensor shares the memory of an input."""
    storage = tensor.untyped_storage().data_ptr()
    return any(isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == storage for each in inputs)


def is_declared_scalar(port: TensorPort, dimensions: int) -> bool:
    """Return whether an output is a scalar, for which the configuration declares [1]."""
    return not dimensions and port.model_dims == (1,) and not port.batching


def strings(array: Array) -> list[Any]:
    """Return the elements of an array as a list, as which programs take strings."""
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
_INPUT: Final = 256
"""Bytes of memory for a bound program, and for each of its inputs."""
_SETTERS: Final[dict[str, Callable[[bool], object]]] = {
    "ENABLE_JIT_EXECUTOR": torch._C._jit_set_profiling_executor,
    "ENABLE_JIT_PROFILING": torch._C._jit_set_profiling_mode,
    "ENABLE_TENSOR_FUSER": torch._C._jit_set_texpr_fuser_enabled,
}


class _Bound(NamedTuple):
    """Program bound to the inputs of a request, in the program's order."""

    converters: tuple[tuple[str, ToTensor], ...]
    call: Call


class ProgramRun:
    """Computation of one instance with a program that other instances may share. For one thread at a time."""

    def __init__(self, model: str, program: Program, binding: Binding, plan: TorchPlan, threads: int) -> None:
        self._model = model
        self.program = program
        self._binding = binding
        self._plan = plan
        self._threads = threads
        self._converters = {
            name: to_tensor(datatype, copied=program.writes_inputs, device=program.device)
            for name, datatype in binding.datatypes.items()
        }
        self._bounds: Memo[frozenset[str], _Bound] = Memo()
        self._all = self._bound(frozenset(binding.inputs))
        self._paths = binding.paths
        self._settings = [(_SETTERS[key], value) for key, value in plan.switches]
        if not plan.optimized:
            self._settings.append((torch._C._set_graph_executor_optimize, False))
        self._stream = torch.cuda.Stream(program.device) if program.device.startswith("cuda") else None

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Compute the outputs of ``selection``. Raises what PyTorch and the model's code raise."""
        bound = self._bound_to(inputs)
        self._set_up()
        with self._device(), self._mode():
            values = [convert(inputs[name]) for name, convert in bound.converters]
            result = bound.call(values)
            paths = self._paths or self._find_paths(result)
            copied = self.program.keeps_state
            return [
                to_array(port, at_path(result, paths[port.name]), values, copied=copied) for port in selection.ports
            ]

    def _set_up(self) -> None:
        """Set what is set for the thread, which changes, and for libraries with one number for all threads."""
        torch.set_num_threads(self._threads)
        for setter, value in self._settings:
            setter(value)

    def _mode(self) -> Any:
        """Return a context in which PyTorch keeps nothing for gradients."""
        return torch.inference_mode() if self._plan.inference_mode else torch.no_grad()

    def _find_paths(self, result: Any) -> Mapping[str, TensorPath]:
        """Return where the outputs are in a result, from the first one, as the program does not say."""
        slots = [program_output(position, path, text=None) for position, path in enumerate(_leaves(result))]
        named = artifact.output_names(self._model, self._binding.outputs, slots)
        paths = self._paths = {name: slot.path for name, slot in named.items()}
        return paths

    def _bound_to(self, inputs: Mapping[str, object]) -> _Bound:
        """Return the program bound to these inputs."""
        return self._all if len(inputs) == len(self._all.converters) else self._bound(frozenset(inputs))

    def _bound(self, names: frozenset[str]) -> _Bound:
        """Return the program bound to these inputs; optional ones may be missing."""
        if (bound := self._bounds.get(names)) is None:
            ordered = [name for name in self._binding.inputs if name in names]
            converters = tuple((name, self._converters[name]) for name in ordered)
            call = self.program.bind([self._binding.inputs[name] for name in ordered])
            bound = _Bound(converters, call)
            CALLS.put(self._bounds, names, bound, _BOUND + _INPUT * len(converters))
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


def _leaves(value: Any, path: TensorPath = ()) -> Iterator[TensorPath]:
    """Yield the path of each leaf: anything but dictionaries, and lists or tuples that are not lists of strings."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    elif isinstance(value, (list, tuple)) and not (value and all(isinstance(each, str) for each in value)):
        for position, each in enumerate(value):
            yield from _leaves(each, (*path, position))
    else:
        yield path


def at_path(result: Any, path: TensorPath) -> Any:
    """Return the part of a result that a path leads to."""
    for step in path:
        result = result[step]
    return result
