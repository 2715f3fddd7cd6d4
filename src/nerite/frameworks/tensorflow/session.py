"""TensorFlow sessions: importing the framework, opening a session, running it, and translating its errors."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np

from nerite.backends import gpu_builds, machine
from nerite.backends.arrays.batches import LARGE
from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.instance import Compute
from nerite.backends.machine import importing, translating
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotInstalled
from nerite.core.tensor import Array
from nerite.frameworks.tensorflow.plan import TensorFlowPlan, TensorFlowSignature

_VARIABLES: Final = "The weights are missing: copy the directory 'variables', which belongs to the model, whole"
_REMEDIES: Final = (
    (
        "Op type not registered",
        "The model has operators of its own: name their library in model_operations { op_library_filename: … }",
    ),
    ("not a valid checkpoint", _VARIABLES),
    ("Unsuccessful TensorSliceReader", _VARIABLES),
    ("variables.data", _VARIABLES),
)
"""Remedies, by a part of TensorFlow's message."""


def open_session(framework: Any, plan: TensorFlowPlan, graph: Any) -> Any:
    """Open a session with a frozen graph, or with a SavedModel that is loaded into ``graph``. Slow.

    Raises ``NeriteError`` with what is wrong with the model, and the remedy.
    """
    if plan.kind == "GPU" and not framework.config.list_physical_devices("GPU"):
        raise NotInstalled(
            f"unable to load '{plan.path}': an instance is to run on a GPU, and TensorFlow {framework.__version__} "
            f"sees none. Set kind: KIND_CPU, or {gpu_builds.remedy_here('tensorflow')}"
        )
    v1 = framework.compat.v1
    session = v1.Session(graph=graph, config=_session_config(v1, plan))
    try:
        with translating(lambda error: _load_error(error, plan.path)):
            if not plan.frozen:
                with graph.as_default(), graph.device("/cpu:0" if plan.kind == "CPU" else None):
                    # Works for SavedModels of any age. The replacement that TensorFlow 2 prefers makes Python objects
                    # of the model, calls it half as fast, and has no own threads and initial operations.
                    v1.saved_model.load(session, list(plan.tags), str(plan.path))
            if plan.init_operations:
                session.run([graph.get_operation_by_name(name) for name in plan.init_operations])
    except BaseException:
        session.close()
        raise
    return session


def load_libraries(framework: Any, plan: TensorFlowPlan) -> None:
    """Load the custom operators of a plan. Raises ``InvalidArgument`` for a library that cannot be loaded."""
    for library in plan.op_libraries:
        try:
            framework.load_op_library(library)
        except Exception as error:
            raise InvalidArgument(
                f"unable to load op library '{library}': {_text(error)}. It has to be built for this version of "
                f"TensorFlow, {framework.__version__}"
            ) from error


def translated(error: Exception) -> NeriteError:
    """Translate an exception from TensorFlow into the error for clients and the log."""
    return Internal(_text(error))


def _session_config(v1: Any, plan: TensorFlowPlan) -> Any:
    config = v1.ConfigProto(
        intra_op_parallelism_threads=plan.intra_op_threads,
        inter_op_parallelism_threads=plan.inter_op_threads,
        use_per_session_threads=plan.own_threads,
        allow_soft_placement=plan.soft_placement,
    )
    optimizer = config.graph_options.optimizer_options
    optimizer.global_jit_level = getattr(type(optimizer), plan.jit_level)
    if plan.mixed_precision:
        rewriting = config.graph_options.rewrite_options
        rewriting.auto_mixed_precision = type(rewriting).ON
    if plan.kind == "CPU":
        config.device_count["GPU"] = 0
    else:
        config.gpu_options.allow_growth = not plan.gpu_fraction
        config.gpu_options.per_process_gpu_memory_fraction = plan.gpu_fraction
    if plan.kind == "GPU":
        config.gpu_options.visible_device_list = str(plan.device)
    return config


def _load_error(error: Exception, path: Path) -> NeriteError:
    text = _text(error)
    remedy = next((remedy for words, remedy in _REMEDIES if words in text), "")
    return Internal(f"unable to load '{path}': {text}{'. ' if remedy else ''}{remedy}")


def _text(error: Exception) -> str:
    """Return the message without the nodes and source locations that may follow it."""
    message = str(getattr(error, "message", "") or error)
    for appendix in ("\n\nOriginal stack trace", "\n\nErrors may have originated", "\nDetected at node", "\n\t [["):
        message = message.partition(appendix)[0]
    return message.strip().rstrip(".")


# The import of TensorFlow: without the parts and the output that are not needed.

_log = logging.getLogger("nerite.frameworks.tensorflow")
# TensorFlow's own output is verbose; the log level of the server decides whether it is written.
_log.setLevel(logging.DEBUG)

_GREETING: Final = re.compile(rb"[IW]\d{4} |WARNING: All log messages before|To enable the following instructions")


@cache
def tensorflow(*, alone: bool) -> ModuleType:
    """Import TensorFlow lazily and return it. Takes seconds the first time. Raises ``NotInstalled``.

    ``alone``: this process runs only TensorFlow. Then it is imported without Keras, which a saved graph does not need
    and which takes a third of the time and a quarter of the memory; and its output becomes debug messages.
    """
    # Only errors, unless the environment of the server says otherwise.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with importing("tensorflow", "tensorflow"):
        if alone:
            with _without_keras(), machine.capture_stderr(_GREETING, _log), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import tensorflow
        else:
            import tensorflow
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    return tensorflow  # type: ignore[no-any-return]  # The package has no types.


@contextmanager
def _without_keras() -> Iterator[None]:
    """Make ``import keras`` fail, as if it were not installed, which TensorFlow handles."""
    if "keras" in sys.modules:
        yield
        return
    sys.modules["keras"] = None  # type: ignore[assignment]  # Makes its import fail.
    try:
        yield
    finally:
        del sys.modules["keras"]


# Running a session.

_Callable: TypeAlias = Callable[..., Sequence[Array]]

_MAX_CALLABLES: Final = 64
"""Maximum number of callables that are kept: one for each selection of outputs and order of inputs."""


def runner_of_session(framework: Any, session: Any, signature: TensorFlowSignature) -> Compute:
    """Return a function that runs a session."""
    feeds, fetches = signature.feeds, signature.fetches
    graph = signature.graph
    narrow_inputs = _bfloat16(graph.inputs) | _bfloat16(graph.defaulted)
    narrow_outputs = _bfloat16(graph.outputs)
    bfloat16 = framework.bfloat16.as_numpy_dtype
    callables: dict[tuple[object, ...], _Callable] = {}

    def compute(selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        key = (selection, *inputs)
        call = callables.get(key)
        if call is None:
            if len(callables) >= _MAX_CALLABLES:
                callables.clear()
            call = callables[key] = _callable(
                framework, session, [feeds[name] for name in inputs], [fetches[name] for name in selection.names]
            )
        if narrow_inputs:
            inputs = {name: array.view(bfloat16) if name in narrow_inputs else array for name, array in inputs.items()}
        arrays = call(*inputs.values())
        if narrow_outputs:
            arrays = [array.view(dtypes.BF16.numpy) if array.dtype == bfloat16 else array for array in arrays]
        return [_owned(array, inputs) for array in arrays]

    return compute


def _bfloat16(tensors: Mapping[str, Any]) -> set[str]:
    """Return the names of BF16 tensors, the one type that numpy lacks."""
    return {name for name, tensor in tensors.items() if tensor.datatype is dtypes.BF16}


def _owned(array: Array, inputs: Mapping[str, Array]) -> Array:
    """Return ``array``, or a copy if it may be in a buffer that the next batch overwrites.

    TensorFlow copies neither its inputs nor what an operator passes through.
    """
    if array.nbytes >= LARGE and any(np.may_share_memory(array, given) for given in inputs.values()):
        return array.copy()
    return array


def _callable(framework: Any, session: Any, feeds: Sequence[str], fetches: Sequence[str]) -> _Callable:
    """Return a function from the tensors ``feeds``, in their order, to ``fetches``."""
    with session.graph.as_default():
        seen = set(feeds)
        wanted = []
        for name in fetches:
            if name in seen:
                # A tensor must not be fetched twice, or fetched and fed.
                name = framework.identity(session.graph.get_tensor_by_name(name)).name
            seen.add(name)
            wanted.append(name)
        make = getattr(session, "_make_callable_from_options", None)
        if make is None:
            return session.make_callable(wanted, feed_list=list(feeds))  # type: ignore[no-any-return]
        # Underlies ``run`` and ``make_callable``, which recompute what to do at each call: 0.2 ms.
        from tensorflow.core.protobuf.config_pb2 import CallableOptions

        return make(CallableOptions(feed=feeds, fetch=wanted))  # type: ignore[no-any-return]
