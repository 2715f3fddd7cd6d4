"""A model's configuration as typed values: a frozen dataclass for each message of ``wire/model_config.proto``.

- The order of the fields is the order in which a configuration is printed.
- A field that is not set has the zero value of its type. A member that can be absent (a message, or a member of a
  oneof) is ``None`` then. At most one member of a oneof is not ``None``.
- Lists are tuples and objects are frozen: a configuration is a value, and is changed by making another one with
  ``dataclasses.replace``. Do not change the dictionaries either.
- An enum is the name of its value.
- A trailing underscore (``global_``) distinguishes a name from Python's keywords and is not part of it.
"""
# Made by tools/build_wire.py from model_config.proto. Do not edit.
# ruff: noqa
# fmt: off

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DataType = Literal["TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8", "TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensorReshape:
    """Shape that the framework sees instead of ``dims``. Empty: one scalar per element of the batch."""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """An input of the model."""
    Format = Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"]
    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    format: ModelInput.Format = "FORMAT_NONE"
    dims: tuple[int, ...] = ()
    """Without the batch dimension; -1 is any size."""
    reshape: ModelTensorReshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    """Requests with different shapes may share a batch."""
    optional: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output of the model."""
    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    """Without the batch dimension; -1 is any size."""
    reshape: ModelTensorReshape | None = None
    label_filename: str = ""
    """File beside config.pbtxt with one class name per line, for the classification extension."""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """A tensor that the server makes to tell a model where the elements of a ragged batch begin and end."""
    Kind = Literal["BATCH_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT", "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN"]
    kind: BatchInput.Kind = "BATCH_ELEMENT_COUNT"
    target_name: tuple[str, ...] = ()
    data_type: DataType = "TYPE_INVALID"
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutput:
    """Outputs of a ragged batch, which are split by the shapes of an input."""
    Kind = Literal["BATCH_SCATTER_WITH_INPUT_SHAPE"]
    target_name: tuple[str, ...] = ()
    kind: BatchOutput.Kind = "BATCH_SCATTER_WITH_INPUT_SHAPE"
    source_input: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersionPolicy:
    """Which versions of the model are served."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Latest:
        """The highest version numbers that exist."""
        num_versions: int = 0

    @dataclass(frozen=True, slots=True, kw_only=True)
    class All:
        """Every version that exists."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Specific:
        """The listed versions."""
        versions: tuple[int, ...] = ()

    latest: ModelVersionPolicy.Latest | None = None
    all: ModelVersionPolicy.All | None = None
    specific: ModelVersionPolicy.Specific | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRateLimiter:
    """What an instance needs before it may execute, and its priority among instances that wait."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Resource:
        """How much of a named resource an instance occupies while it executes."""
        name: str = ""
        global_: bool = False
        """One pool for all devices, instead of one per device."""
        count: int = 0

    resources: tuple[ModelRateLimiter.Resource, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInstanceGroup:
    """Instances of the model of one kind."""
    Kind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]

    @dataclass(frozen=True, slots=True, kw_only=True)
    class SecondaryDevice:
        """A further device that an instance uses."""
        SecondaryDeviceKind = Literal["KIND_NVDLA"]
        kind: ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind = "KIND_NVDLA"
        device_id: int = 0

    name: str = ""
    kind: ModelInstanceGroup.Kind = "KIND_AUTO"
    count: int = 0
    """On GPUs, the number of instances on each GPU."""
    rate_limiter: ModelRateLimiter | None = None
    gpus: tuple[int, ...] = ()
    secondary_devices: tuple[ModelInstanceGroup.SecondaryDevice, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    """The instances are loaded, and the scheduler gives them no requests."""
    host_policy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptimizationPolicy:
    """Optimization by the framework. Which parts matter depends on the backend."""
    ModelPriority = Literal["PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"]

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Graph:
        """Optimization of the graph."""
        level: int = 0
        """0 the framework's default, -1 basic, 1 extended, 2 none."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Cuda:
        """Settings for CUDA only."""

        @dataclass(frozen=True, slots=True, kw_only=True)
        class GraphSpec:
            """The shapes of one CUDA graph to capture."""

            @dataclass(frozen=True, slots=True, kw_only=True)
            class Shape:
                """The shape of one input of a captured CUDA graph."""
                dim: tuple[int, ...] = ()

            @dataclass(frozen=True, slots=True, kw_only=True)
            class LowerBound:
                """The smallest shapes that a captured CUDA graph may be used for."""
                batch_size: int = 0
                input: dict[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape] = field(default_factory=dict)

            batch_size: int = 0
            input: dict[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape] = field(default_factory=dict)
            graph_lower_bound: ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound | None = None

        graphs: bool = False
        busy_wait_events: bool = False
        graph_spec: tuple[ModelOptimizationPolicy.Cuda.GraphSpec, ...] = ()
        output_copy_stream: bool = False

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ExecutionAccelerators:
        """The execution providers for instances on GPUs and for those on the CPU."""

        @dataclass(frozen=True, slots=True, kw_only=True)
        class Accelerator:
            """An execution provider and its options."""
            name: str = ""
            parameters: dict[str, str] = field(default_factory=dict)

        gpu_execution_accelerator: tuple[ModelOptimizationPolicy.ExecutionAccelerators.Accelerator, ...] = ()
        cpu_execution_accelerator: tuple[ModelOptimizationPolicy.ExecutionAccelerators.Accelerator, ...] = ()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class PinnedMemoryBuffer:
        """Whether tensors pass through page-locked memory on their way to or from a GPU."""
        enable: bool = False

    graph: ModelOptimizationPolicy.Graph | None = None
    priority: ModelOptimizationPolicy.ModelPriority = "PRIORITY_DEFAULT"
    cuda: ModelOptimizationPolicy.Cuda | None = None
    execution_accelerators: ModelOptimizationPolicy.ExecutionAccelerators | None = None
    input_pinned_memory: ModelOptimizationPolicy.PinnedMemoryBuffer | None = None
    output_pinned_memory: ModelOptimizationPolicy.PinnedMemoryBuffer | None = None
    gather_kernel_buffer_threshold: int = 0
    eager_batching: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQueuePolicy:
    """What a queue does when it is full or when a request has waited too long."""
    TimeoutAction = Literal["REJECT", "DELAY"]
    timeout_action: ModelQueuePolicy.TimeoutAction = "REJECT"
    default_timeout_microseconds: int = 0
    """0: no timeout."""
    allow_timeout_override: bool = False
    max_queue_size: int = 0
    """0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDynamicBatching:
    """Requests that arrive close together are executed together."""
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    """Priorities run from 1, the most urgent, to this number."""
    default_priority_level: int = 0
    default_queue_policy: ModelQueuePolicy | None = None
    priority_queue_policy: dict[int, ModelQueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSequenceBatching:
    """Requests with one correlation id go to one instance, in order. Without a strategy it is ``direct``."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Control:
        """A signal that informs a model about the sequence it works on, and how the signal is encoded."""
        Kind = Literal["CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_CORRID"]
        kind: ModelSequenceBatching.Control.Kind = "CONTROL_SEQUENCE_START"
        int32_false_true: tuple[int, ...] = ()
        """The value for false and the value for true; so are the next two."""
        fp32_false_true: tuple[float, ...] = ()
        bool_false_true: tuple[bool, ...] = ()
        data_type: DataType = "TYPE_INVALID"
        """Of the correlation id only."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ControlInput:
        """An input tensor that carries signals."""
        name: str = ""
        control: tuple[ModelSequenceBatching.Control, ...] = ()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class InitialState:
        """The value of a state before the first request of a sequence."""
        data_type: DataType = "TYPE_INVALID"
        dims: tuple[int, ...] = ()
        name: str = ""
        zero_data: bool | None = None
        data_file: str | None = None
        """In the directory initial_state/ of the model."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class State:
        """A tensor that one request of a sequence leaves for the next."""
        input_name: str = ""
        output_name: str = ""
        data_type: DataType = "TYPE_INVALID"
        dims: tuple[int, ...] = ()
        initial_state: tuple[ModelSequenceBatching.InitialState, ...] = ()
        use_same_buffer_for_input_output: bool = False
        use_growable_memory: bool = False

    @dataclass(frozen=True, slots=True, kw_only=True)
    class StrategyDirect:
        """Each sequence keeps one batch slot of one instance for its whole life."""
        max_queue_delay_microseconds: int = 0
        minimum_slot_utilization: float = 0.0

    @dataclass(frozen=True, slots=True, kw_only=True)
    class StrategyOldest:
        """Each sequence keeps one instance; the oldest requests of all its sequences make the batch."""
        max_candidate_sequences: int = 0
        preferred_batch_size: tuple[int, ...] = ()
        max_queue_delay_microseconds: int = 0
        preserve_ordering: bool = False

    direct: ModelSequenceBatching.StrategyDirect | None = None
    oldest: ModelSequenceBatching.StrategyOldest | None = None
    max_sequence_idle_microseconds: int = 0
    control_input: tuple[ModelSequenceBatching.ControlInput, ...] = ()
    state: tuple[ModelSequenceBatching.State, ...] = ()
    iterative_sequence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEnsembling:
    """Models whose outputs are the inputs of others, served as one."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Step:
        """One model of an ensemble."""
        model_name: str = ""
        model_version: int = 0
        """-1: the latest version."""
        input_map: dict[str, str] = field(default_factory=dict)
        """From the model's tensor names to the ensemble's; so is ``output_map``."""
        output_map: dict[str, str] = field(default_factory=dict)
        model_namespace: str = ""

    step: tuple[ModelEnsembling.Step, ...] = ()
    max_inflight_requests: int = 0
    """Of each step; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A free-form value for the backend."""
    string_value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWarmup:
    """A request that each instance answers before the model is ready."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Input:
        """One input of a warm-up request, and where its data comes from."""
        data_type: DataType = "TYPE_INVALID"
        dims: tuple[int, ...] = ()
        zero_data: bool | None = None
        random_data: bool | None = None
        input_data_file: str | None = None
        """In the directory warmup/ of the model."""

    name: str = ""
    batch_size: int = 0
    inputs: dict[str, ModelWarmup.Input] = field(default_factory=dict)
    count: int = 0
    """Repetitions; 0 counts as 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOperations:
    """Libraries of custom operations."""
    op_library_filename: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTransactionPolicy:
    """How many responses a request has."""
    decoupled: bool = False
    """Any number of responses, including none; otherwise one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRepositoryAgents:
    """The repository agents, in the order in which they run."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Agent:
        """A program that prepares the model's files."""
        name: str = ""
        parameters: dict[str, str] = field(default_factory=dict)

    agents: tuple[ModelRepositoryAgents.Agent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponseCache:
    """Whether answers may come from the response cache."""
    enable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """How the metrics of the model are counted."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class MetricControl:
        """How one metric of the model is counted."""

        @dataclass(frozen=True, slots=True, kw_only=True)
        class MetricIdentifier:
            """A metric, by the name under which it is reported."""
            family: str = ""

        @dataclass(frozen=True, slots=True, kw_only=True)
        class HistogramOptions:
            """The upper bounds of a histogram's buckets."""
            buckets: tuple[float, ...] = ()

        metric_identifier: ModelMetrics.MetricControl.MetricIdentifier | None = None
        histogram_options: ModelMetrics.MetricControl.HistogramOptions | None = None

    metric_control: tuple[ModelMetrics.MetricControl, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The whole configuration of a model."""
    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    version_policy: ModelVersionPolicy | None = None
    max_batch_size: int = 0
    """0: tensors have no batch dimension."""
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
    """From a GPU's compute capability to the file for it."""
    metric_tags: dict[str, str] = field(default_factory=dict)
    """Labels of every metric of the model."""
    parameters: dict[str, ModelParameter] = field(default_factory=dict)
    model_warmup: tuple[ModelWarmup, ...] = ()
    model_operations: ModelOperations | None = None
    model_transaction_policy: ModelTransactionPolicy | None = None
    model_repository_agents: ModelRepositoryAgents | None = None
    response_cache: ModelResponseCache | None = None
    model_metrics: ModelMetrics | None = None
