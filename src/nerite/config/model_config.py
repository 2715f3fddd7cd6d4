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

from nerite.config.schema import DataTypeName, Double, Int32, Int64, Single, Uint32, Uint64

# What a model takes and gives, as typed data: inputs, outputs and the helper tensors of ragged batches.
#
# See ``model_config.py`` for the conventions that all of these classes follow.

InputFormat = Annotated[Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"], "ModelInput.Format"]
BatchInputKind = Annotated[
    Literal[
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
        "BATCH_ITEM_SHAPE",
        "BATCH_ITEM_SHAPE_FLATTEN",
    ],
    "BatchInput.Kind",
]
BatchOutputKind = Annotated[Literal["BATCH_SCATTER_WITH_INPUT_SHAPE"], "BatchOutput.Kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensorReshape:
    """The shape that the framework sees instead of ``dims``. Empty: a scalar an element of the batch."""

    shape: tuple[Int64, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """An input. ``dims`` is without the batch dimension; -1 is any size."""

    name: str = ""
    data_type: DataTypeName = "TYPE_INVALID"
    format: InputFormat = "FORMAT_NONE"
    dims: tuple[Int64, ...] = ()
    reshape: ModelTensorReshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output. ``dims`` is without the batch dimension; -1 is any size."""

    name: str = ""
    data_type: DataTypeName = "TYPE_INVALID"
    dims: tuple[Int64, ...] = ()
    reshape: ModelTensorReshape | None = None
    label_filename: str = ""
    """A file beside config.pbtxt: one class name a line."""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """A tensor that the server makes, to tell a model where the elements of a ragged batch begin and end."""

    kind: BatchInputKind = "BATCH_ELEMENT_COUNT"
    target_name: tuple[str, ...] = ()
    data_type: DataTypeName = "TYPE_INVALID"
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutput:
    """Outputs of a ragged batch that are cut apart by the shapes of an input."""

    target_name: tuple[str, ...] = ()
    kind: BatchOutputKind = "BATCH_SCATTER_WITH_INPUT_SHAPE"
    source_input: tuple[str, ...] = ()


# The three ways to schedule a model, as typed data: dynamic batching, sequence batching, an ensemble.
#
# See ``model_config.py`` for the conventions that all of these classes follow.

TimeoutAction = Annotated[Literal["REJECT", "DELAY"], "ModelQueuePolicy.TimeoutAction"]
ControlKind = Annotated[
    Literal["CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_CORRID"],
    "ModelSequenceBatching.Control.Kind",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQueuePolicy:
    """What a queue does when it is full or when a request has waited too long."""

    timeout_action: TimeoutAction = "REJECT"
    default_timeout_microseconds: Uint64 = 0
    """0: no timeout."""
    allow_timeout_override: bool = False
    max_queue_size: Uint32 = 0
    """0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDynamicBatching:
    """Requests that arrive near each other are executed together."""

    preferred_batch_size: tuple[Int32, ...] = ()
    max_queue_delay_microseconds: Uint64 = 0
    preserve_ordering: bool = False
    priority_levels: Uint64 = 0
    default_priority_level: Uint64 = 0
    default_queue_policy: ModelQueuePolicy | None = None
    priority_queue_policy: dict[Uint64, ModelQueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceControl:
    """One signal that tells a model about the sequence it works on, and how the signal is encoded."""

    MESSAGE: ClassVar[str] = "ModelSequenceBatching.Control"
    kind: ControlKind = "CONTROL_SEQUENCE_START"
    int32_false_true: tuple[Int32, ...] = ()
    fp32_false_true: tuple[Single, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataTypeName = "TYPE_INVALID"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceControlInput:
    """An input tensor that carries signals."""

    MESSAGE: ClassVar[str] = "ModelSequenceBatching.ControlInput"
    name: str = ""
    control: tuple[SequenceControl, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInitialState:
    """What a state holds before the first request of a sequence."""

    MESSAGE: ClassVar[str] = "ModelSequenceBatching.InitialState"
    ONEOFS: ClassVar[dict[str, tuple[str, ...]]] = {"state_data": ("zero_data", "data_file")}
    data_type: DataTypeName = "TYPE_INVALID"
    dims: tuple[Int64, ...] = ()
    name: str = ""
    zero_data: bool | None = None
    data_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """A tensor that one request of a sequence leaves for the next."""

    MESSAGE: ClassVar[str] = "ModelSequenceBatching.State"
    input_name: str = ""
    output_name: str = ""
    data_type: DataTypeName = "TYPE_INVALID"
    dims: tuple[Int64, ...] = ()
    initial_state: tuple[SequenceInitialState, ...] = ()
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDirect:
    """Each sequence keeps one batch slot of one instance for its whole life."""

    MESSAGE: ClassVar[str] = "ModelSequenceBatching.StrategyDirect"
    max_queue_delay_microseconds: Uint64 = 0
    minimum_slot_utilization: Single = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOldest:
    """Each sequence keeps one instance; the oldest requests of all its sequences make the batch."""

    MESSAGE: ClassVar[str] = "ModelSequenceBatching.StrategyOldest"
    max_candidate_sequences: Int32 = 0
    preferred_batch_size: tuple[Int32, ...] = ()
    max_queue_delay_microseconds: Uint64 = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSequenceBatching:
    """Requests with one sequence id go to one instance, in order. Neither strategy set means ``direct``."""

    ONEOFS: ClassVar[dict[str, tuple[str, ...]]] = {"strategy_choice": ("direct", "oldest")}
    direct: SequenceDirect | None = None
    oldest: SequenceOldest | None = None
    max_sequence_idle_microseconds: Uint64 = 0
    control_input: tuple[SequenceControlInput, ...] = ()
    state: tuple[SequenceState, ...] = ()
    iterative_sequence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """One model of an ensemble. The maps lead from the model's tensor names to the ensemble's."""

    MESSAGE: ClassVar[str] = "ModelEnsembling.Step"
    model_name: str = ""
    model_version: Int64 = 0
    """-1: the latest."""
    input_map: dict[str, str] = field(default_factory=dict)
    output_map: dict[str, str] = field(default_factory=dict)
    model_namespace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEnsembling:
    """Models whose outputs are the inputs of others, served as one."""

    step: tuple[EnsembleStep, ...] = ()
    max_inflight_requests: Uint32 = 0
    """Of each step; 0: no limit."""


# How a framework may optimise a model, as typed data.
#
# See ``model_config.py`` for the conventions that all of these classes follow.

ModelPriority = Annotated[
    Literal["PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"], "ModelOptimizationPolicy.ModelPriority"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationGraph:
    """How hard the framework optimises the graph: 0 its default, -1 basic, 1 extended, 2 not at all."""

    MESSAGE: ClassVar[str] = "ModelOptimizationPolicy.Graph"
    level: Int32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphShape:
    """The shape of one input of a captured CUDA graph."""

    MESSAGE: ClassVar[str] = "ModelOptimizationPolicy.Cuda.GraphSpec.Shape"
    dim: tuple[Int64, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphLowerBound:
    """The smallest shapes that a captured CUDA graph may be used for."""

    MESSAGE: ClassVar[str] = "ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound"
    batch_size: Int32 = 0
    input: dict[str, CudaGraphShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphSpec:
    """The shapes of one CUDA graph to capture."""

    MESSAGE: ClassVar[str] = "ModelOptimizationPolicy.Cuda.GraphSpec"
    batch_size: Int32 = 0
    input: dict[str, CudaGraphShape] = field(default_factory=dict)
    graph_lower_bound: CudaGraphLowerBound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationCuda:
    """What concerns CUDA alone."""

    MESSAGE: ClassVar[str] = "ModelOptimizationPolicy.Cuda"
    graphs: bool = False
    busy_wait_events: bool = False
    graph_spec: tuple[CudaGraphSpec, ...] = ()
    output_copy_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """An execution provider and its options."""

    MESSAGE: ClassVar[str] = "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator"
    name: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionAccelerators:
    """The execution providers for instances on GPUs and for those on the CPU."""

    MESSAGE: ClassVar[str] = "ModelOptimizationPolicy.ExecutionAccelerators"
    gpu_execution_accelerator: tuple[Accelerator, ...] = ()
    cpu_execution_accelerator: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedMemoryBuffer:
    """Whether tensors pass through page-locked memory on their way to a GPU."""

    MESSAGE: ClassVar[str] = "ModelOptimizationPolicy.PinnedMemoryBuffer"
    enable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptimizationPolicy:
    """Everything about optimisation; which parts matter depends on the backend."""

    graph: OptimizationGraph | None = None
    priority: ModelPriority = "PRIORITY_DEFAULT"
    cuda: OptimizationCuda | None = None
    execution_accelerators: ExecutionAccelerators | None = None
    input_pinned_memory: PinnedMemoryBuffer | None = None
    output_pinned_memory: PinnedMemoryBuffer | None = None
    gather_kernel_buffer_threshold: Uint32 = 0
    eager_batching: bool = False


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
