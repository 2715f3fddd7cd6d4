"""Fills in the defaults that depend on other fields, on the names of files, or on the GPUs of the machine.

The functions are pure: they take a configuration and return another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

from nerite.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelSequenceBatching,
    ModelTransactionPolicy,
    ModelVersionPolicy,
)
from nerite.core.errors import InvalidArgument

ENSEMBLE: Final = "ensemble"
TENSORRT: Final = "tensorrt_plan"


class Framework(NamedTuple):
    """A backend with one of its file names, and the platform of such files if they have one."""

    backend: str
    filename: str
    platform: str = ""
    is_directory: bool | None = False
    """Whether a recognised file is a directory; ``None``: either."""


FRAMEWORKS: Final = (
    Framework("tensorflow", "model.savedmodel", "tensorflow_savedmodel", True),
    Framework("tensorflow", "model.graphdef", "tensorflow_graphdef"),
    Framework("tensorrt", "model.plan", TENSORRT),
    Framework("litert", "model.tflite"),
    Framework("onnxruntime", "model.onnx", "onnxruntime_onnx", None),
    Framework("openvino", "model.xml", "", None),
    Framework("pytorch", "model.pt", "pytorch_libtorch"),
    Framework("pytorch", "model.pt2", "torch_aoti"),
    Framework("python", "model.py", "", None),
    Framework("llm", "openvino_model.xml", "openvino_genai"),
    Framework("llm", "openvino_language_model.xml", "openvino_genai"),
    Framework("llm", "openvino_encoder_model.xml", "openvino_genai"),
    Framework("llm", "model_index.json", "openvino_genai"),
    Framework("llm", "model.safetensors", "huggingface"),
    Framework("llm", "model.safetensors.index.json", "huggingface"),
    Framework("llm", "model.gguf", "gguf"),
    Framework("fil", "xgboost.ubj"),
    Framework("fil", "xgboost.json"),
    Framework("fil", "xgboost.model"),
    Framework("fil", "model.txt"),
    Framework("fil", "checkpoint.tl"),
    # Other formats that OpenVINO reads. If another framework reads them as well, OpenVINO must be named.
    Framework("openvino", "model.onnx"),
    Framework("openvino", "model.tflite"),
    Framework("openvino", "model.savedmodel", "", True),
    Framework("openvino", "model.pdmodel"),
    Framework("openvino", "model.pb"),
)
"""In the order in which a version directory is searched."""

_SEVERAL_FILES: Final = frozenset({"fil"})
"""Backends that choose from their file names themselves."""
_ALSO_CALLED: Final[Mapping[str, str]] = {"tflite": "litert", "armnn_tflite": "litert", "openvino_genai": "llm"}
"""Other names of backends: those of other projects' backends for Triton, and of an engine."""

PLATFORMS: Final[Mapping[str, str]] = {
    framework.platform: framework.backend for framework in FRAMEWORKS if framework.platform
}
"""The backend of each platform."""


def others_with_the_file(config: ModelConfig) -> list[str]:
    """Return the other backends that can read the file of a complete configuration, if they are named in it."""
    filename = config.default_model_filename
    return [each.backend for each in FRAMEWORKS if each.filename == filename and each.backend != config.backend]


def fitting(files: Mapping[str, bool]) -> str:
    """Return the fields of a configuration for a version with these ``files``; empty if the files are ambiguous.

    The values of ``files`` are whether each is a directory.
    """
    framework, filename = _by_files(ModelConfig(), files, FRAMEWORKS), ""
    if framework is None:
        alike = [(each, name) for each in FRAMEWORKS for name in files if _is_alike(each, name, files[name])]
        if len({name for _, name in alike}) != 1:
            return ""
        framework, name = alike[0]
        filename = f' default_model_filename: "{name}"'
    written = f'platform: "{framework.platform}"' if framework.platform else f'backend: "{framework.backend}"'
    return written + filename


def _is_alike(framework: Framework, name: str, is_directory: bool) -> bool:
    """Return True if a file has the suffix of the files of a framework, and the suffix is specific enough."""
    suffix = PurePath(name).suffix
    fits = suffix == PurePath(framework.filename).suffix and framework.is_directory in (None, is_directory)
    return fits and suffix not in (".txt", ".json", ".py")


def choose_backend(config: ModelConfig, name: str, files: Mapping[str, bool] | None) -> ModelConfig:
    """Return ``config`` with name, backend, platform and file name filled in, as far as they follow from each other.

    ``name`` is the name of the model. ``files`` are the entries of its first version directory, and whether each is a
    directory; ``None`` if no version exists. Raises ``InvalidArgument`` if the backend cannot be determined.
    """
    backend = _ALSO_CALLED.get(config.backend, config.backend)
    config = dataclasses.replace(config, name=config.name or name, backend=backend)
    framework = _framework(config, files)
    if framework is not None:
        return dataclasses.replace(
            config,
            backend=config.backend or framework.backend,
            platform=config.platform or framework.platform,
            default_model_filename=config.default_model_filename or framework.filename,
        )
    if config.backend or config.platform or config.default_model_filename:
        return config
    _, dot, backend = name.partition(".")
    if not dot:
        raise InvalidArgument(
            f"Invalid model name: Could not determine backend for model '{name}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'."
        )
    filename = f"model.{backend}"
    return dataclasses.replace(config, backend=_ALSO_CALLED.get(backend, backend), default_model_filename=filename)


def _framework(config: ModelConfig, files: Mapping[str, bool] | None) -> Framework | None:
    """Return the framework that the fields of ``config`` select; if none is set, the one that the files select."""
    if config.backend in _SEVERAL_FILES:
        return None
    if config.backend:
        own = [framework for framework in FRAMEWORKS if framework.backend == config.backend]
        if not config.platform and len(own) > 1:
            # The backend has several file formats, which only the file distinguishes.
            found = _by_filename(config.default_model_filename, own) or _by_files(config, files, own)
            if found is not None or config.backend == "tensorflow":
                return found
        named = [framework for framework in own if framework.platform == config.platform]
        return next(iter(named or own), None)
    if config.platform:
        named = [framework for framework in FRAMEWORKS if framework.platform == config.platform]
        return named[0] if named else _by_filename(config.default_model_filename, FRAMEWORKS)
    return _by_filename(config.default_model_filename, FRAMEWORKS) or _by_files(config, files, FRAMEWORKS)


def _by_filename(filename: str, among: Sequence[Framework]) -> Framework | None:
    return next((framework for framework in among if framework.filename == filename), None)


def _by_files(config: ModelConfig, files: Mapping[str, bool] | None, among: Sequence[Framework]) -> Framework | None:
    if files is None or config.default_model_filename:
        return None
    for framework in among:
        is_directory = files.get(framework.filename)
        if is_directory is not None and framework.is_directory in (None, is_directory):
            return framework
    return None


class Gpus(NamedTuple):
    """The GPUs that instances may use, by their numbers in instance groups."""

    numbers: tuple[int, ...] = ()
    minimum: float = 6.0
    """The minimum compute capability of a GPU."""
    preferred: bool = True
    """Whether ``KIND_AUTO`` selects GPUs. It does not if the framework cannot use them, but can use CPUs."""
    misfit: str = ""
    """Why the framework of this Python cannot use them; empty if it can, or if the model has another Python."""
    remedy: str = ""
    """What makes it use them: a part of a sentence, which may end with a command."""


NO_GPUS: Final = Gpus()

IDLE_DEFAULT_MICROSECONDS: Final = 1_000_000
_PREFER_CPU: Final = frozenset({"fil", "litert", "openvino"})
"""Backends that prefer the CPU even if there are GPUs."""
_TWO_ON_CPU: Final = frozenset({"tensorflow", "onnxruntime"})
"""Backends with two instances on the CPU by default."""


def without_gpus(config: ModelConfig) -> ModelConfig:
    """Return ``config`` with its instances on the CPU, to find out what else is wrong where there are no GPUs."""
    groups = tuple(
        dataclasses.replace(group, kind="KIND_CPU", gpus=()) if group.kind == "KIND_GPU" else group
        for group in config.instance_group
    )
    return dataclasses.replace(config, instance_group=groups)


def normalise(config: ModelConfig) -> ModelConfig:
    """Return ``config`` with version policy, batching and optimization filled in. Idempotent."""
    config = dataclasses.replace(
        config,
        version_policy=config.version_policy or ModelVersionPolicy(latest=ModelVersionPolicy.Latest(num_versions=1)),
        dynamic_batching=_dynamic(config.dynamic_batching, config.max_batch_size),
        sequence_batching=_sequence(config.sequence_batching, config.max_batch_size),
    )
    if config.ensemble_scheduling is None:
        return dataclasses.replace(config, optimization=_optimization(config.optimization))
    # The configuration of an ensemble always states whether it is decoupled, which follows from its models.
    policy = config.model_transaction_policy or ModelTransactionPolicy()
    return dataclasses.replace(config, model_transaction_policy=policy)


def normalise_instances(config: ModelConfig, gpus: Gpus) -> ModelConfig:
    """Return ``config`` with its instance groups filled in for a machine with ``gpus``. Idempotent."""
    if config.ensemble_scheduling is not None:
        return config
    filled = tuple(_group(config, index, group, gpus) for index, group in enumerate(_groups(config)))
    return dataclasses.replace(config, instance_group=filled)


def misses_gpus(config: ModelConfig, gpus: Gpus) -> bool:
    """Return whether ``KIND_AUTO`` selects CPUs because of the misfit of ``gpus``."""
    if config.ensemble_scheduling is not None or not gpus.misfit:
        return False
    fitting = gpus._replace(preferred=True)
    return any(_kind(group, gpus) != _kind(group, fitting) for group in _groups(config))


def _dynamic(batching: ModelDynamicBatching | None, max_batch_size: int) -> ModelDynamicBatching | None:
    if batching is None or batching.preferred_batch_size or max_batch_size <= 0:
        return batching
    return dataclasses.replace(batching, preferred_batch_size=(max_batch_size,))


def _sequence(batching: ModelSequenceBatching | None, max_batch_size: int) -> ModelSequenceBatching | None:
    if batching is None:
        return None
    idle = batching.max_sequence_idle_microseconds or IDLE_DEFAULT_MICROSECONDS
    oldest = batching.oldest
    if oldest is not None and not oldest.preferred_batch_size and max_batch_size > 0:
        oldest = dataclasses.replace(oldest, preferred_batch_size=(max_batch_size,))
    return dataclasses.replace(batching, max_sequence_idle_microseconds=idle, oldest=oldest)


def _optimization(policy: ModelOptimizationPolicy | None) -> ModelOptimizationPolicy:
    policy = policy or ModelOptimizationPolicy()
    pinned = ModelOptimizationPolicy.PinnedMemoryBuffer(enable=True)
    return dataclasses.replace(
        policy,
        input_pinned_memory=policy.input_pinned_memory or pinned,
        output_pinned_memory=policy.output_pinned_memory or pinned,
    )


def _groups(config: ModelConfig) -> Sequence[ModelInstanceGroup]:
    kind: ModelInstanceGroup.Kind = "KIND_CPU" if config.backend in _PREFER_CPU else "KIND_AUTO"
    return config.instance_group or (ModelInstanceGroup(name=config.name, kind=kind),)


def _kind(group: ModelInstanceGroup, gpus: Gpus) -> ModelInstanceGroup.Kind:
    if group.kind != "KIND_AUTO":
        return group.kind
    wanted = gpus.preferred or bool(group.gpus)
    return "KIND_GPU" if gpus.numbers and wanted and set(group.gpus) <= set(gpus.numbers) else "KIND_CPU"


def _group(config: ModelConfig, index: int, group: ModelInstanceGroup, gpus: Gpus) -> ModelInstanceGroup:
    kind = _kind(group, gpus)
    count = group.count
    if count < 1:
        count = 2 if kind == "KIND_CPU" and config.backend in _TWO_ON_CPU else 1
    return dataclasses.replace(
        group,
        name=group.name or f"{config.name}_{index}",
        kind=kind,
        count=count,
        gpus=tuple(sorted(gpus.numbers)) if kind == "KIND_GPU" and not group.gpus else group.gpus,
    )
