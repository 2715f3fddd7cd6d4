"""The ONNX Runtime backend: completes configurations, opens models, creates and runs their instances."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any, Final

from nerite.backends import gpu_builds
from nerite.backends.arrays.backend import ArrayBackend, ArrayModel
from nerite.backends.arrays.calls import strings_as_text
from nerite.backends.arrays.device import DeviceComputation
from nerite.backends.arrays.graph import GraphTensor, ModelGraph
from nerite.backends.arrays.instance import Compute
from nerite.backends.configuration import Shape, flag
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import translating
from nerite.backends.onnxruntime import session
from nerite.backends.onnxruntime.run import DeviceSessionRun, check_bfloat16, run_with_values
from nerite.backends.onnxruntime.session import (
    CPU,
    CUDA,
    DEFAULT_ENTRIES,
    ONE_AT_A_TIME,
    OPENVINO,
    TENSORRT,
    OnnxSessionPlan,
    load_cuda_libraries,
    onnxruntime,
)
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, NeriteError, NotInstalled, Unsupported
from nerite.core.tensor import Array, Buffer, DataType
from nerite.devices import cuda

_DATATYPES: Final[dict[str, DataType]] = {
    "tensor(bool)": dtypes.BOOL,
    "tensor(uint8)": dtypes.UINT8,
    "tensor(uint16)": dtypes.UINT16,
    "tensor(uint32)": dtypes.UINT32,
    "tensor(uint64)": dtypes.UINT64,
    "tensor(int8)": dtypes.INT8,
    "tensor(int16)": dtypes.INT16,
    "tensor(int32)": dtypes.INT32,
    "tensor(int64)": dtypes.INT64,
    "tensor(float16)": dtypes.FP16,
    "tensor(float)": dtypes.FP32,
    "tensor(double)": dtypes.FP64,
    "tensor(string)": dtypes.BYTES,
    "tensor(bfloat16)": dtypes.BF16,
}

_OTHER_KINDS: Final[dict[str, str]] = {
    "seq": "ONNX_TYPE_SEQUENCE",
    "map": "ONNX_TYPE_MAP",
    "opaque": "ONNX_TYPE_OPAQUE",
    "sparse_tensor": "ONNX_TYPE_SPARSETENSOR",
}


def _tensors(nodes: Iterable[Any]) -> dict[str, GraphTensor]:
    return {
        node.name: GraphTensor(node.name, _datatype(node.name, node.type), tuple(map(_size, node.shape)))
        for node in nodes
    }


def _size(dim: object) -> int:
    # A symbolic size is a string, an unknown one is None.
    return dim if isinstance(dim, int) and dim >= 0 else -1


def _datatype(name: str, onnx_type: str) -> DataType:
    found = _DATATYPES.get(onnx_type)
    if found is not None:
        return found
    kind = onnx_type.partition("(")[0]
    if kind == "tensor":
        raise Unsupported(f"tensor '{name}' is a {onnx_type}, but the protocol has no data type for its elements")
    shown = _OTHER_KINDS.get(kind, "ONNX_TYPE_UNKNOWN")
    text = f"Unsupported ONNX Type '{shown}' for I/O '{name}', expected 'ONNX_TYPE_TENSOR'."
    if kind in ("seq", "map"):
        text += (
            " Export the model with tensors only; for a scikit-learn classifier that is "
            "convert_sklearn(..., options={'zipmap': False})."
        )
    raise Unsupported(text)


# Opening a session, and the errors of that.

_one_at_a_time = threading.Lock()

_OPTION_ERRORS: Final = frozenset({2, 6})
"""INVALID_ARGUMENT and RUNTIME_EXCEPTION, which may be caused by options rather than by the file."""
_MESSAGE: Final = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)
_BOUND: Final = "Error in execution: "
"""What a run with I/O binding puts before the message, instead of the error's number."""


def _translated(error: Exception) -> NeriteError:
    """Translate an exception from ONNX Runtime into the error for clients and the log."""
    found = _MESSAGE.match(str(error))
    text = f" {found[1]}: {found[2]}" if found else f": {str(error).removeprefix(_BOUND)}"
    return Internal(f"onnx runtime error{text}")


def _session_error(error: Exception, plan: OnnxSessionPlan) -> NeriteError:
    """Translate an error of opening a session, adding entries that may be the cause: some errors just say ``stoi``."""
    found = _MESSAGE.match(str(error))
    own = {key: value for key, value in plan.entries if DEFAULT_ENTRIES.get(key) != value}
    if not own or (found is not None and int(found[1]) not in _OPTION_ERRORS):
        return _translated(error)
    given = ", ".join(f"'{key}' is '{value}'" for key, value in own.items())
    return _translated(error).prefixed("", f" (ONNX Runtime's own parameters, for {plan.file.path}: {given})")


@cache
def _make_global_pool(intra_op_threads: int, inter_op_threads: int) -> None:
    # Must precede the first session of the process; all plans of a server have the same sizes.
    onnxruntime().set_global_thread_pool_sizes(intra_op_threads, inter_op_threads)


def _options(plan: OnnxSessionPlan, framework: ModuleType) -> Any:
    options = framework.SessionOptions()
    options.graph_optimization_level = getattr(framework.GraphOptimizationLevel, plan.graph_level)
    mode = framework.ExecutionMode
    options.execution_mode = mode.ORT_PARALLEL if plan.parallel else mode.ORT_SEQUENTIAL
    if plan.global_threads:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = plan.intra_op_threads
        options.inter_op_num_threads = plan.inter_op_threads
    options.enable_cpu_mem_arena = plan.memory_arena
    options.enable_mem_pattern = plan.memory_pattern
    for key, value in plan.entries:
        options.add_session_config_entry(key, value)
    for library in plan.op_libraries:
        options.register_custom_ops_library(library)
    return options


def _check_providers(plan: OnnxSessionPlan, available: Sequence[str]) -> None:
    """Raise if a provider is missing: before opening, because of a package; after, because it failed to start."""
    for provider in plan.providers:
        if provider.name not in available:
            raise NotInstalled(
                f"execution provider {provider.name} is not available; available are: {', '.join(available)}. It needs "
                f"another build of ONNX Runtime and the libraries which that requires: {_installing(provider.name)}"
            )


def _installing(provider: str) -> str:
    """Return the command that installs a build with a provider."""
    if provider == OPENVINO:
        return "pip install onnxruntime-openvino"
    command = gpu_builds.command_here(gpu_builds.ONNXRUNTIME)
    return f"{command} (and TensorRT)" if provider == TENSORRT else command


class OnnxModel(ArrayModel[OnnxSessionPlan]):
    """Open model: its sessions, and the state that its instances share.

    Instances on a CPU share one session: ONNX Runtime allows that, the throughput is the same as with one session each
    (see ``benchmarks/onnx_backend.py``), and the weights are in memory only once. Instances on accelerators get a
    session each, because some providers allow only one thread. ``share_session_between_instances`` overrides this.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        # Looked at once: the file may change meanwhile, and all instances must use the same model.
        self._file = session.model_file(context)
        self._run_entries = session.run_entries(context)
        key = "share_session_between_instances"
        self._share = flag(context, key, default=False) if context.parameter(key) else None

    def key(self, instance: InstanceContext) -> OnnxSessionPlan:
        """Return the plan of the session for an instance. Raises ``InvalidArgument``."""
        return session.make_plan(self.context, instance, self._file)

    def load(self, key: OnnxSessionPlan) -> Any:
        """Open an ``InferenceSession``. Slow: reads the model and optimises its graph, with the GIL released.

        Raises ``NeriteError`` with ONNX Runtime's message, or with the package to install.
        """
        framework = onnxruntime()
        _check_providers(key, framework.get_available_providers())
        if any(provider.name == CUDA for provider in key.providers):
            load_cuda_libraries()
        if key.global_threads:
            _make_global_pool(key.intra_op_threads, key.inter_op_threads)
        serialised = any(provider.name in ONE_AT_A_TIME for provider in key.providers)
        with translating(lambda error: _session_error(error, key)), _one_at_a_time if serialised else nullcontext():
            opened = framework.InferenceSession(
                str(key.file.path),
                _options(key, framework),
                providers=[(provider.name, dict(provider.options)) for provider in key.providers],
                # Otherwise an accelerator that fails to start is replaced by the CPU, with a note on standard output.
                enable_fallback=0,
            )
        _check_providers(key, opened.get_providers())
        return opened

    def shares(self, key: OnnxSessionPlan, copy: Any) -> bool:
        """Return True for a session that runs on the CPU only, unless the configuration decides."""
        return key.providers == (CPU,) if self._share is None else self._share

    def graph(self, copy: Any) -> ModelGraph:
        """Return the inputs and outputs of a session. Raises ``Unsupported`` for a type that the protocol lacks."""
        sides = (copy.get_inputs(), copy.get_outputs(), copy.get_overridable_initializers())
        return ModelGraph(*map(_tensors, sides))

    def computation(self, copy: Any, instance: InstanceContext) -> Compute | DeviceComputation:
        """Return the function that runs a session: with numpy arrays if numpy has all types of the model.

        Arrays are faster by 3 to 10 microseconds per run on a CPU than ``OrtValue`` objects; I/O binding is slower
        than both. On a GPU it saves the copies, but from Python it takes no strings as inputs.
        """
        graph, options = self.graph(copy), None
        if self._run_entries:
            options = onnxruntime().RunOptions()
            for name, value in self._run_entries.items():
                options.add_run_config_entry(name, value)
        if graph.uses_bfloat16:
            check_bfloat16()
        assert self._face is not None, "not open"
        if instance.kind == "GPU" and cuda.installed() and dtypes.BYTES not in self._face.datatypes.values():
            return DeviceSessionRun(copy, options, instance.device)
        # The native method behind ``InferenceSession.run``, which adds 4 to 7 microseconds of checks in Python that are
        # redundant here. Attribute and arguments are as old as the wrapper; without them, its own ``run`` is used.
        run = run_with_values(copy, graph) if graph.uses_bfloat16 else getattr(copy, "_sess", copy).run
        return lambda selection, inputs: run(selection.names, inputs, options)

    def text(self, shape: Shape, data: Buffer) -> Array:
        """Convert strings to ``str`` objects."""
        return strings_as_text(shape, data)

    def failure(self, error: Exception) -> NeriteError:
        """Translate an exception from ONNX Runtime."""
        return _translated(error)


class OnnxRuntimeBackend(ArrayBackend):
    """Backend for ONNX models on ONNX Runtime."""

    name = "onnxruntime"
    model = OnnxModel
