"""A model's configuration as typed data, field by field as Triton's ``ModelConfig``.

Conventions, here and in the modules it is put together from (``tensors``, ``scheduling_choice``, ``optimization``):

- The order of the fields is the order in which the configuration is printed.
- What is not given has its type's zero value. A member that can be absent (a message, or a member of a oneof) is
  ``None`` then. Of the members that ``ONEOFS`` names together at most one is not ``None``.
- Lists are tuples and objects are frozen: a configuration is a value, and changing one means making another with
  ``dataclasses.replace``. The dicts are not to be changed either.
- A trailing underscore (``global_``) keeps a name clear of Python's keywords and is not part of it.
- An enum is the name of its value. ``MESSAGE`` is the name in the protobuf schema where it is not the class's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from nerite.config.field_types import DataTypeName, Double, Int32, Int64, Uint32
from nerite.config.optimization import ModelOptimizationPolicy
from nerite.config.scheduling_choice import ModelDynamicBatching, ModelEnsembling, ModelSequenceBatching
from nerite.config.tensors import BatchInput, BatchOutput, ModelInput, ModelOutput

InstanceKind = Annotated[Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"], "ModelInstanceGroup.Kind"]
SecondaryDeviceKind = Annotated[Literal["KIND_NVDLA"], "ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicyLatest:
    """The highest version numbers there are."""

    MESSAGE: ClassVar[str] = "ModelVersionPolicy.Latest"
    num_versions: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicyAll:
    """Every version there is."""

    MESSAGE: ClassVar[str] = "ModelVersionPolicy.All"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPolicySpecific:
    """The versions that are listed."""

    MESSAGE: ClassVar[str] = "ModelVersionPolicy.Specific"
    versions: tuple[Int64, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersionPolicy:
    """Which versions of a model are served."""

    ONEOFS: ClassVar[dict[str, tuple[str, ...]]] = {"policy_choice": ("latest", "all", "specific")}
    latest: VersionPolicyLatest | None = None
    all: VersionPolicyAll | None = None
    specific: VersionPolicySpecific | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimiterResource:
    """How much of a named resource an instance occupies while it executes."""

    MESSAGE: ClassVar[str] = "ModelRateLimiter.Resource"
    name: str = ""
    global_: bool = False
    """One pool for all devices, instead of one for each."""
    count: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRateLimiter:
    """What an instance needs before it may execute, and how it stands against others that wait."""

    resources: tuple[RateLimiterResource, ...] = ()
    priority: Uint32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryDevice:
    """A further device that an instance uses."""

    MESSAGE: ClassVar[str] = "ModelInstanceGroup.SecondaryDevice"
    kind: SecondaryDeviceKind = "KIND_NVDLA"
    device_id: Int64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInstanceGroup:
    """Copies of the model of one kind. On GPUs ``count`` is for each GPU."""

    name: str = ""
    kind: InstanceKind = "KIND_AUTO"
    count: Int32 = 0
    rate_limiter: ModelRateLimiter | None = None
    gpus: tuple[Int32, ...] = ()
    secondary_devices: tuple[SecondaryDevice, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A free-form value for the backend."""

    string_value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupInput:
    """One input of a warm-up request, and where its data comes from."""

    MESSAGE: ClassVar[str] = "ModelWarmup.Input"
    ONEOFS: ClassVar[dict[str, tuple[str, ...]]] = {"input_data_type": ("zero_data", "random_data", "input_data_file")}
    data_type: DataTypeName = "TYPE_INVALID"
    dims: tuple[Int64, ...] = ()
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str | None = None
    """In the model's folder ``warmup``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWarmup:
    """A request that each instance answers before the model is ready."""

    name: str = ""
    batch_size: Uint32 = 0
    inputs: dict[str, WarmupInput] = field(default_factory=dict)
    count: Uint32 = 0
    """How often; 0 is once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOperations:
    """Libraries of custom operations."""

    op_library_filename: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTransactionPolicy:
    """How many responses a request has: one, or (decoupled) any number."""

    decoupled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryAgent:
    """A program that prepares the model's files."""

    MESSAGE: ClassVar[str] = "ModelRepositoryAgents.Agent"
    name: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRepositoryAgents:
    """The agents, in the order in which they run."""

    agents: tuple[RepositoryAgent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponseCache:
    """Whether answers may come from the response cache."""

    enable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricIdentifier:
    """A metric, by the name under which it is reported."""

    MESSAGE: ClassVar[str] = "ModelMetrics.MetricControl.MetricIdentifier"
    family: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramOptions:
    """The upper bounds of a histogram's buckets."""

    MESSAGE: ClassVar[str] = "ModelMetrics.MetricControl.HistogramOptions"
    buckets: tuple[Double, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricControl:
    """How one metric of the model is counted."""

    MESSAGE: ClassVar[str] = "ModelMetrics.MetricControl"
    ONEOFS: ClassVar[dict[str, tuple[str, ...]]] = {"metric_options": ("histogram_options",)}
    metric_identifier: MetricIdentifier | None = None
    histogram_options: HistogramOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """How the metrics of the model are counted."""

    metric_control: tuple[MetricControl, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that is said about a model."""

    ONEOFS: ClassVar[dict[str, tuple[str, ...]]] = {
        "scheduling_choice": ("dynamic_batching", "sequence_batching", "ensemble_scheduling")
    }
    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    version_policy: ModelVersionPolicy | None = None
    max_batch_size: Int32 = 0
    """0: no batch dimension."""
    input: tuple[ModelInput, ...] = ()
    output: tuple[ModelOutput, ...] = ()
    batch_input: tuple[BatchInput, ...] = ()
    batch_output: tuple[BatchOutput, ...] = ()
    optimization: ModelOptimizationPolicy | None = None
    dynamic_batching: ModelDynamicBatching | None = None
    sequence_batching: ModelSequenceBatching | None = None
    ensemble_scheduling: ModelEnsembling | None = None
    instance_group: tuple[ModelInstanceGroup, ...] = ()
    default_model_filename: str = ""
    cc_model_filenames: dict[str, str] = field(default_factory=dict)
    metric_tags: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, ModelParameter] = field(default_factory=dict)
    model_warmup: tuple[ModelWarmup, ...] = ()
    model_operations: ModelOperations | None = None
    model_transaction_policy: ModelTransactionPolicy | None = None
    model_repository_agents: ModelRepositoryAgents | None = None
    response_cache: ModelResponseCache | None = None
    model_metrics: ModelMetrics | None = None
