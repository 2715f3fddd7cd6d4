"""The fields of a configuration that are read and checked, and change nothing: for any model, or with some backends.

All others have an effect; ``tests/ledger`` names a test for each. Those that a model sets are told when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from nerite.config.model_config import ModelConfig
from nerite.config.schema import MessageSchema, schema_of


class NoEffect(NamedTuple):
    """Why a field changes nothing."""

    reason: str
    heeded_by: frozenset[str] = frozenset()
    """The backends with which it has an effect."""


ARRAYS: Final = frozenset({"fil", "litert", "onnxruntime", "openvino", "pytorch", "tensorflow", "tensorrt"})
"""The backends whose models take and give arrays, and know nothing of requests."""
BACKENDS: Final = ARRAYS | {"llm", "python", "tensorrt_llm", "vllm"}
"""Those that come with the server. Another one is given the configuration, and may heed any field."""

_ACCELERATED: Final = frozenset({"litert", "onnxruntime", "tensorflow"})
_TENSORRT: Final = frozenset({"tensorrt"})

FIELDS: Final[Mapping[str, NoEffect]] = {
    "runtime": NoEffect("the backend is built in", frozenset({"pytorch"})),
    "default_model_filename": NoEffect("the backend looks for no file", BACKENDS - {"llm", "tensorrt_llm", "vllm"}),
    "cc_model_filenames": NoEffect("every GPU is given the same file, that of default_model_filename"),
    "model_operations": NoEffect(
        "the backend loads no libraries of operators", frozenset({"onnxruntime", "tensorflow"})
    ),
    "input.format": NoEffect("the model says how its tensors are laid out"),
    "batch_input": NoEffect("the backend is given requests and not batches", ARRAYS),
    "batch_output": NoEffect("the backend is given requests and not batches", ARRAYS),
    "instance_group.secondary_devices": NoEffect("accelerators for deep learning beside GPUs are not supported"),
    "optimization.graph": NoEffect(
        "the backend has no levels of optimization", frozenset({"onnxruntime", "tensorflow"})
    ),
    "optimization.priority": NoEffect("the backend has no streams of another priority", _TENSORRT),
    "optimization.cuda.graphs": NoEffect("the backend captures no CUDA graphs", _TENSORRT),
    "optimization.cuda.graph_spec": NoEffect("a CUDA graph is captured for each shape that comes"),
    "optimization.cuda.busy_wait_events": NoEffect("the thread of an instance sleeps while its GPU computes"),
    "optimization.cuda.output_copy_stream": NoEffect("outputs are copied in the stream that computed them"),
    "optimization.execution_accelerators.gpu_execution_accelerator": NoEffect(
        "the backend has no execution providers", _ACCELERATED
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator": NoEffect(
        "the backend has no execution providers", _ACCELERATED
    ),
    "optimization.input_pinned_memory": NoEffect("the framework decides how it copies to a GPU"),
    "optimization.output_pinned_memory": NoEffect("the framework decides how it copies from a GPU"),
    "optimization.gather_kernel_buffer_threshold": NoEffect("inputs are gathered by the CPU"),
    "optimization.eager_batching": NoEffect("a batch is gathered when an instance is free for it"),
    "sequence_batching.state.use_same_buffer_for_input_output": NoEffect(
        "a state is handed on as it is, without a copy"
    ),
}
"""By their dotted names; a message stands for all that is in it."""


def without_effect(written: ModelConfig, backend: str) -> Iterator[str]:
    """Yield a line for the log for each field that is set in ``written`` and has no effect on the model.

    ``backend`` is empty for an ensemble.
    """
    if backend and backend not in BACKENDS:
        return
    for name, why in FIELDS.items():
        if backend not in why.heeded_by and _is_set(written, schema_of(ModelConfig), name.split(".")):
            place = "" if not why.heeded_by else f" with backend '{backend}'" if backend else " for an ensemble"
            yield f"'{name}' has no effect{place}: {why.reason}"


def _is_set(message: Any, schema: MessageSchema, path: list[str]) -> bool:
    """Return whether a field at or below a message has a value that is not its default."""
    field, *inside = schema.fields[path[0]], *path[1:]
    value = getattr(message, field.attribute)
    if not inside:
        return bool(value != field.default)
    return any(_is_set(each, field.message, inside) for each in _messages(value))


def _messages(value: Any) -> Iterable[Any]:
    """Return the messages that a field has: any number."""
    return () if value is None else value if isinstance(value, tuple) else (value,)
