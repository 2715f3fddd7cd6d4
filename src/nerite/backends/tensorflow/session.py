"""Sessions of TensorFlow: how they are opened, and what their errors mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from nerite.backends.tensorflow.plan import SessionPlan
from nerite.core.errors import Internal, InvalidArgument, NeriteError

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


def of_saved_model(framework: Any, plan: SessionPlan) -> Any:
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


def of_graph(framework: Any, plan: SessionPlan, graph: Any) -> Any:
    """Return a session with a graph. Raises ``NeriteError``."""
    return _initialised(_session(framework, plan, graph), plan)


def load_libraries(framework: Any, plan: SessionPlan) -> None:
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


def _session(framework: Any, plan: SessionPlan, graph: Any) -> Any:
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


def _device(plan: SessionPlan) -> str | None:
    return "/cpu:0" if plan.kind == "CPU" else None


def _initialised(session: Any, plan: SessionPlan) -> Any:
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
