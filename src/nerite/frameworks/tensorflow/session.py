"""Sessions of TensorFlow: how they are opened, and what their errors mean."""

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

from nerite.backends import machine
from nerite.backends.arrays.batches import LARGE
from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.instance import Compute
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
"""What to do about an error with these words in it."""


def of_saved_model(framework: Any, plan: TensorFlowPlan) -> Any:
    """Return a session with the SavedModel of a plan. Slow. Raises ``NeriteError`` with what is wrong with it."""
    session = _session(framework, plan, framework.Graph())
    v1 = framework.compat.v1
    try:
        with session.graph.as_default(), session.graph.device(_device(plan)):
            # A SavedModel of any age is one of these; what TensorFlow 2 would rather have us use makes Python objects
            # of it, calls them twice as slowly, and has no threads and initial operations of its own.
            v1.saved_model.load(session, list(plan.tags), str(plan.path))
    except Exception as error:  # Whatever the framework raises says why the model cannot be opened.
        session.close()
        raise _refused(error, plan.path) from error
    return _initialised(session, plan)


def of_graph(framework: Any, plan: TensorFlowPlan, graph: Any) -> Any:
    """Return a session with a graph. Raises ``NeriteError``."""
    return _initialised(_session(framework, plan, graph), plan)


def load_libraries(framework: Any, plan: TensorFlowPlan) -> None:
    """Load the operators that a plan names. Raises ``InvalidArgument`` for a library that cannot be loaded."""
    for library in plan.op_libraries:
        try:
            framework.load_op_library(library)
        except Exception as error:
            raise InvalidArgument(
                f"unable to load op library '{library}': {_text(error)}. It has to be built for this version of "
                f"TensorFlow, {framework.__version__}"
            ) from error


def translated(error: Exception) -> NeriteError:
    """Return what a client and the log are told of an exception from TensorFlow."""
    return error if isinstance(error, NeriteError) else Internal(_text(error))


def _session(framework: Any, plan: TensorFlowPlan, graph: Any) -> Any:
    v1 = framework.compat.v1
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
    return v1.Session(graph=graph, config=config)


def _device(plan: TensorFlowPlan) -> str | None:
    return "/cpu:0" if plan.kind == "CPU" else None


def _initialised(session: Any, plan: TensorFlowPlan) -> Any:
    if plan.init_operations:
        try:
            session.run([session.graph.get_operation_by_name(name) for name in plan.init_operations])
        except Exception as error:  # As above; also a name that the graph does not have.
            session.close()
            raise _refused(error, plan.path) from error
    return session


def _refused(error: Exception, path: Path) -> NeriteError:
    text = _text(error)
    remedy = next((remedy for words, remedy in _REMEDIES if words in text), "")
    return Internal(f"unable to load '{path}': {text}{'. ' if remedy else ''}{remedy}")


def _text(error: Exception) -> str:
    """Return the message without what may follow it: nodes, and places in the program that made the graph."""
    message = str(getattr(error, "message", "") or error)
    for appendix in ("\n\nOriginal stack trace", "\n\nErrors may have originated", "\nDetected at node", "\n\t [["):
        message = message.partition(appendix)[0]
    return message.strip().rstrip(".")


# The import of TensorFlow: as little of it, and as quietly, as it lets us.

_log = logging.getLogger("nerite.frameworks.tensorflow")
# What TensorFlow says of itself is verbose, and the server decides whether it is written.
_log.setLevel(logging.DEBUG)

_GREETING: Final = re.compile(rb"[IW]\d{4} |WARNING: All log messages before|To enable the following instructions")


@cache
def tensorflow(*, alone: bool) -> ModuleType:
    """Return the module. Takes seconds the first time.

    ``alone``: the process is there for TensorFlow. Then it is imported without Keras, which a saved graph does not
    need and which is a third of the time and a quarter of the memory; and what it says is a detail in the log. Raises
    ``Unsupported`` if it is not installed.
    """
    # Below errors, unless whoever started the server wants it otherwise.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        if alone:
            with _without_keras(), machine.capture_stderr(_GREETING, _log), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import tensorflow
        else:
            import tensorflow
    except ImportError as error:
        raise NotInstalled(f"unable to import tensorflow ({error}): pip install 'nerite[tensorflow]'") from error
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    return tensorflow  # type: ignore[no-any-return]  # The package has no types.


@contextmanager
def _without_keras() -> Iterator[None]:
    """Have ``import keras`` fail, as where it is not installed, which TensorFlow is prepared for."""
    if "keras" in sys.modules:
        yield
        return
    sys.modules["keras"] = None  # type: ignore[assignment]  # That is how one says so.
    try:
        yield
    finally:
        del sys.modules["keras"]


# Running a session.

_Callable: TypeAlias = Callable[..., Sequence[Array]]

_MAX_CALLABLES: Final = 64
"""Ways to call a model that are remembered: one for each set of outputs, and order of inputs."""


def runner_of_session(framework: Any, session: Any, signature: TensorFlowSignature) -> Compute:
    """Return the computation of a session."""
    feeds, fetches = signature.feeds, signature.fetches
    graph = signature.graph
    narrow_inputs = _narrow(graph.inputs) | _narrow(graph.defaulted)
    narrow_outputs = _narrow(graph.outputs)
    bfloat16 = framework.bfloat16.as_numpy_dtype
    callables: dict[tuple[object, ...], _Callable] = {}

    def compute(selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        key = (selection, *inputs)
        call = callables.get(key)
        try:
            if call is None:
                if len(callables) >= _MAX_CALLABLES:
                    callables.clear()
                call = callables[key] = _callable(
                    framework, session, [feeds[name] for name in inputs], [fetches[name] for name in selection.names]
                )
            if narrow_inputs:
                inputs = {
                    name: array.view(bfloat16) if name in narrow_inputs else array for name, array in inputs.items()
                }
            arrays = call(*inputs.values())
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise translated(error) from error
        if narrow_outputs:
            arrays = [array.view(dtypes.BF16.numpy) if array.dtype == bfloat16 else array for array in arrays]
        return [_ours(array, inputs) for array in arrays]

    return compute


def _narrow(tensors: Mapping[str, Any]) -> set[str]:
    """Return the tensors of the one type that numpy does not have."""
    return {name for name, tensor in tensors.items() if tensor.datatype is dtypes.BF16}


def _ours(array: Array, inputs: Mapping[str, Array]) -> Array:
    """Return ``array``, or a copy where it may be in a buffer that the next batch is put into.

    What an operator hands through, TensorFlow does not copy, and neither what it is fed.
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
                # Nothing may be fetched twice, or fetched and fed.
                name = framework.identity(session.graph.get_tensor_by_name(name)).name
            seen.add(name)
            wanted.append(name)
        make = getattr(session, "_make_callable_from_options", None)
        if make is None:
            return session.make_callable(wanted, feed_list=list(feeds))  # type: ignore[no-any-return]
        # What lies under ``run`` and ``make_callable``, which work out anew at each call what is to be done: 0.2 ms.
        from tensorflow.core.protobuf.config_pb2 import CallableOptions

        return make(CallableOptions(feed=feeds, fetch=wanted))  # type: ignore[no-any-return]
