"""Validates a configuration in Triton's words and order, and finds every mistake instead of only the first.

The checks are in the four groups of Triton: of the configuration by itself, before anything is loaded
(``check_config``); of the tensors, which a backend may have completed (``check_tensors``); of the states of sequences
(``check_sequences``); and of the instance groups, for this machine (``check_instances``). A check is skipped if the
text of a field that it reads has a mistake, because its result might be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from nerite.config.defaults import ENSEMBLE, FRAMEWORKS, PLATFORMS, TENSORRT, Gpus, fitting
from nerite.config.mistake import FieldPath, Mistake, nearest
from nerite.config.model_config import ModelConfig, ModelInstanceGroup
from nerite.config.model_parameters import check_demand_mode, check_queue_bounds, check_tenants_share_cache
from nerite.config.schema import MessageSchema, schema_of
from nerite.config.text import Parsed
from nerite.config.validate_ensemble import check_ensemble
from nerite.config.validate_schedulers import check_dynamic_batching, check_sequence_batching, check_states
from nerite.config.validate_tensors import check_batch_tensors, check_inputs, check_outputs
from nerite.core.client_text import escapes_directory
from nerite.core.errors import Internal, NotInstalled

CUSTOMIZABLE_METRICS: Final = frozenset({"nv_inference_first_response_histogram_ms"})


class Check(NamedTuple):
    """A check and the fields that it reads."""

    reads: tuple[str, ...]
    find: Callable[[ModelConfig], Iterator[Mistake]]


def check_config(config: ModelConfig, text: Parsed, files: Mapping[str, bool] | None = None) -> list[Mistake]:
    """Return the mistakes in ``config`` by itself; ``text`` is what it was read from.

    ``files`` are the entries of a version directory, and whether each is a directory. Remedies make use of them.
    """
    backend = Check(("backend", "platform", "default_model_filename"), partial(_check_backend, files or {}))
    return _run((backend, *_CONFIG_CHECKS), config, text)


def check_tensors(config: ModelConfig, text: Parsed) -> list[Mistake]:
    """Return the mistakes in the inputs and outputs of ``config``."""
    return _run(_TENSOR_CHECKS, config, text)


def check_sequences(config: ModelConfig, text: Parsed) -> list[Mistake]:
    """Return the mistakes in the controls and states of ``config``, given its inputs and outputs."""
    return _run(_SEQUENCE_CHECKS, config, text)


MAX_INSTANCES: Final = 1024
"""Maximum number of instances of a model."""


def check_instances(config: ModelConfig, text: Parsed, gpus: Gpus) -> list[Mistake]:
    """Return the mistakes in the instance groups of ``config`` on a machine with ``gpus``."""
    if config.ensemble_scheduling is not None or not text.trusts(("instance_group",)):
        return []
    mistakes: list[Mistake] = []
    left = MAX_INSTANCES
    for index, group in enumerate(config.instance_group):
        mistakes += _check_group(config, index, group, gpus)
        before, left = left, left - group.count * max(len(group.gpus), 1)
        if left < 0 <= before:
            mistakes.append(
                Mistake(
                    message=f"model {config.name} has more than {MAX_INSTANCES} instances",
                    path=("instance_group", index, "count"),
                    remedy="Write a smaller count. An instance takes a thread or a process.",
                )
            )
    return mistakes


def metric_warnings(config: ModelConfig) -> list[str]:
    """Return Triton's log lines about metrics in ``config`` that cannot be customized."""
    if config.model_metrics is None:
        return []
    return [
        f"Metric family '{control.metric_identifier.family}' in 'metric_identifier' is not a customizable metric in "
        "Triton core."
        for control in config.model_metrics.metric_control
        if control.metric_identifier is not None and control.metric_identifier.family not in CUSTOMIZABLE_METRICS
    ]


def _run(checks: Collection[Check], config: ModelConfig, text: Parsed) -> list[Mistake]:
    return [mistake for check in checks if text.trusts(check.reads) for mistake in check.find(config)]


def _check_backend(files: Mapping[str, bool], config: ModelConfig) -> Iterator[Mistake]:
    name, platform, backend = config.name, config.platform, config.backend
    if not backend:
        if platform != ENSEMBLE:
            yield Mistake(
                message=f"unexpected platform type '{platform}' for {name}",
                path=("platform",),
                remedy=_platform_remedy(platform, files),
            )
    elif platform == ENSEMBLE:
        yield Mistake(
            message=f"Ensemble model '{name}' must have platform type '{platform}' and empty backend type",
            path=("backend",),
            remedy="Remove 'backend'.",
        )
    elif backend in PLATFORMS.values() and PLATFORMS.get(platform) != backend:
        allowed = [other for other, owner in PLATFORMS.items() if owner == backend]
        yield Mistake(
            message=f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}",
            path=("platform",),
            remedy=f'Write platform: "{allowed[0]}"' + "".join(f' or "{other}"' for other in allowed[1:]) + "."
            if backend == "tensorflow"
            else f"Keep backend: \"{backend}\" and remove 'platform', or the other way round.",
        )


def _platform_remedy(platform: str, files: Mapping[str, bool]) -> str:
    if fits := fitting(files):
        return f"Write {fits}: that is what its files are for."
    if platform in {framework.backend for framework in FRAMEWORKS}:
        return f'It is a backend, and no platform: write backend: "{platform}".'
    meant = nearest(platform, [*PLATFORMS, ENSEMBLE]) if platform else ""
    if platform and not meant:
        meant = next((known for known in PLATFORMS if platform.lower() in known), "")
    if meant:
        return f'Did you mean platform: "{meant}"?'
    return 'Say which backend it is, as in: backend: "python"'


def _check_files(config: ModelConfig) -> Iterator[Mistake]:
    """Find file names that lead out of the directory of the version or of the model."""
    if escapes_directory(config.default_model_filename):
        yield _outside("default_model_filename", config.default_model_filename, (), "version")
    for key, name in config.cc_model_filenames.items():
        if escapes_directory(name):
            yield _outside("cc_model_filenames", name, (key,), "version")
    for index, name in enumerate(_libraries(config)):
        # Libraries of a container image may be anywhere, and are named by an absolute path.
        if escapes_directory(name) and not name.startswith("/"):
            yield _outside("op_library_filename", name, (index,), "model")


def check_override(config: ModelConfig) -> Iterator[Mistake]:
    """Find settings in the configuration of a load request that only the owner of the repository may use."""
    for index, name in enumerate(_libraries(config)):
        if name.startswith("/"):
            yield _outside("op_library_filename", name, (index,), "model")


def _libraries(config: ModelConfig) -> tuple[str, ...]:
    return () if config.model_operations is None else config.model_operations.op_library_filename


def _outside(field: str, name: str, place: FieldPath, whose: str) -> Mistake:
    inside: FieldPath = ("model_operations", field) if field == "op_library_filename" else (field,)
    return Mistake(
        message=f"{field} '{name}' must stay within the directory of the {whose}",
        path=(*inside, *place),
        remedy="Write the name of a file in it; the file may be a link.",
    )


def _check_batch_size(config: ModelConfig) -> Iterator[Mistake]:
    if config.max_batch_size < 0:
        yield Mistake(
            message=f"'max_batch_size' must be non-negative value for {config.name}",
            path=("max_batch_size",),
            remedy="Write the largest batch, or 0 for a model whose tensors have no batch dimension.",
        )


def _check_decoupled_cache(config: ModelConfig) -> Iterator[Mistake]:
    policy, cache = config.model_transaction_policy, config.response_cache
    if policy is not None and policy.decoupled and cache is not None and cache.enable:
        yield Mistake(
            message=f"Response Cache does not currently support model {config.name} with 'decoupled' transaction "
            "policy. Please disable the response cache.",
            path=("response_cache", "enable"),
            remedy="Remove 'response_cache'.",
        )


def _check_metrics(config: ModelConfig) -> Iterator[Mistake]:
    if config.model_metrics is None:
        return
    for index, control in enumerate(config.model_metrics.metric_control):
        path = ("model_metrics", "metric_control", index)
        if control.metric_identifier is None:
            yield Mistake(
                message="metric control must specify 'metric_identifier'",
                path=path,
                remedy='Write metric_identifier { family: "…" }.',
            )
        elif not control.metric_identifier.family:
            yield Mistake(
                message="metric identifier must specify non-empty 'family'",
                path=(*path, "metric_identifier"),
                remedy=f'Write family: "…", for instance "{next(iter(CUSTOMIZABLE_METRICS))}".',
            )
        if control.histogram_options is None:
            yield Mistake(
                message="metric control must specify 'histogram_options'",
                path=path,
                remedy="Write histogram_options { buckets: [ 100, 1000 ] }.",
            )
        elif not control.histogram_options.buckets:
            yield Mistake(
                message="histogram options must specify non-empty 'buckets'",
                path=(*path, "histogram_options"),
                remedy="Write the upper bounds of the buckets, as in: buckets: [ 100, 1000 ]",
            )


def _check_group(config: ModelConfig, index: int, group: ModelInstanceGroup, gpus: Gpus) -> Iterator[Mistake]:
    path = ("instance_group", index)
    head = f"instance group {group.name} of model {config.name}"
    if group.kind in ("KIND_MODEL", "KIND_CPU") and group.gpus:
        yield Mistake(
            message=f"{head} has kind {group.kind} but specifies one or more GPUs",
            path=(*path, "gpus"),
            remedy="Write kind: KIND_GPU, or remove 'gpus'."
            if gpus.numbers
            else "Remove 'gpus': this machine has no GPU that could be used.",
        )
    elif group.kind == "KIND_GPU" and not group.gpus:
        yield Mistake(
            message=f"{head} has kind KIND_GPU but no GPUs are available",
            path=(*path, "kind"),
            remedy="Write kind: KIND_CPU, or kind: KIND_AUTO for a GPU where there is one.",
            elsewhere=True,
        )
    elif group.kind == "KIND_GPU" and gpus.misfit and set(group.gpus) <= set(gpus.numbers):
        message = f"{head} has kind KIND_GPU, but {gpus.misfit}"
        remedy = gpus.remedy[0].upper() + gpus.remedy[1:]
        if not gpus.preferred:
            remedy = f"Write kind: KIND_CPU, or {gpus.remedy}"
        yield Mistake(
            message=message,
            path=(*path, "kind"),
            remedy=remedy,
            error=NotInstalled,
            elsewhere=True,
            client_message=f"{message}. {remedy}",
        )
    elif group.kind == "KIND_GPU":
        there = ", ".join(map(str, sorted(gpus.numbers)))
        for place, gpu in enumerate(group.gpus):
            if gpu not in gpus.numbers:
                yield Mistake(
                    message=f"{head} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum "
                    f"required CUDA compute compatibility of {gpus.minimum:.6f} are: {there}",
                    path=(*path, "gpus", place),
                    remedy="Write the number of a GPU that is there."
                    if gpus.numbers
                    else "Write kind: KIND_CPU and remove 'gpus': this machine has no GPU that could be used.",
                    elsewhere=True,
                )
    elif group.kind == "KIND_AUTO":
        yield Mistake(
            message=f"{head} has unexpected kind KIND_AUTO",
            path=(*path, "kind"),
            remedy="Write kind: KIND_CPU or kind: KIND_GPU.",
            error=Internal,
        )
    if group.profile and config.platform != TENSORRT:
        yield Mistake(
            message=f"{head} and platform {config.platform}specifies profile field which is only supported for "
            "TensorRT models",
            path=(*path, "profile"),
            remedy="Remove 'profile'.",
        )


_CONFIG_CHECKS: Final = (
    Check(("default_model_filename", "cc_model_filenames", "model_operations"), _check_files),
    Check(("max_batch_size",), _check_batch_size),
    Check(("dynamic_batching", "max_batch_size"), check_dynamic_batching),
    Check(("sequence_batching", "max_batch_size", "response_cache"), check_sequence_batching),
    Check(
        ("ensemble_scheduling", "platform", "input", "output", "instance_group", "optimization", "model_warmup"),
        check_ensemble,
    ),
    Check(("model_transaction_policy", "response_cache"), _check_decoupled_cache),
    Check(("model_metrics",), _check_metrics),
    Check(("parameters",), check_queue_bounds),
    Check(("parameters",), check_tenants_share_cache),
    Check(("parameters",), check_demand_mode),
)
_TENSOR_CHECKS: Final = (
    Check(("input", "max_batch_size", "platform"), check_inputs),
    Check(("output", "max_batch_size", "platform"), check_outputs),
    Check(("batch_input", "batch_output", "input", "output"), check_batch_tensors),
)
_SEQUENCE_CHECKS: Final = (Check(("sequence_batching", "input"), check_states),)

# Fields that are read and checked, but have no effect: for any model, or with some backends. The log lists those that a
# model sets when it is loaded. All other fields have an effect; ``tests/ledger`` names a test for each.


class NoEffect(NamedTuple):
    """Why a field has no effect."""

    reason: str
    heeded_by: frozenset[str] = frozenset()
    """The backends with which the field has an effect."""


ARRAYS: Final = frozenset({"fil", "litert", "onnxruntime", "openvino", "pytorch", "tensorflow", "tensorrt"})
"""The backends whose models work on arrays and do not see requests."""
BACKENDS: Final = ARRAYS | {"llm", "python", "tensorrt_llm", "vllm"}
"""The backends of the server. Any other backend receives the configuration, and may use every field."""

_ACCELERATED: Final = frozenset({"litert", "onnxruntime", "tensorflow"})
_TENSORRT: Final = frozenset({"tensorrt"})
_PINNED: Final = frozenset({"onnxruntime", "pytorch"})

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
    "optimization.cuda.output_copy_stream": NoEffect("the backend decides which stream outputs are copied in"),
    "optimization.execution_accelerators.gpu_execution_accelerator": NoEffect(
        "the backend has no execution providers", _ACCELERATED
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator": NoEffect(
        "the backend has no execution providers", _ACCELERATED
    ),
    "optimization.input_pinned_memory": NoEffect("the backend has no instances that copy from pinned memory", _PINNED),
    "optimization.output_pinned_memory": NoEffect("the backend has no instances that copy to pinned memory", _PINNED),
    "optimization.gather_kernel_buffer_threshold": NoEffect("inputs are gathered by the CPU"),
    "optimization.eager_batching": NoEffect("a batch is gathered when an instance is free for it"),
    "sequence_batching.state.use_same_buffer_for_input_output": NoEffect(
        "a state is handed on as it is, without a copy"
    ),
}
"""By dotted name; a message stands for all of its fields."""


def without_effect(written: ModelConfig, backend: str) -> Iterator[str]:
    """Yield a log line for each field that is set in ``written`` and has no effect on the model.

    ``backend`` is empty for an ensemble.
    """
    if backend and backend not in BACKENDS:
        return
    for name, why in FIELDS.items():
        if backend not in why.heeded_by and _is_set(written, schema_of(), name.split(".")):
            place = "" if not why.heeded_by else f" with backend '{backend}'" if backend else " for an ensemble"
            yield f"'{name}' has no effect{place}: {why.reason}"


def _is_set(message: Any, schema: MessageSchema, path: list[str]) -> bool:
    """Return True if a field at or below a message has another value than its default."""
    field, *inside = schema.fields[path[0]], *path[1:]
    value = getattr(message, field.attribute)
    if not inside:
        return bool(value != field.default)
    messages = value if field.repeated else () if value is None else (value,)
    return any(_is_set(each, field.message, inside) for each in messages)
