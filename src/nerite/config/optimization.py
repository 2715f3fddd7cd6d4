"""How a framework may optimise a model, as typed data.

See ``model_config.py`` for the conventions that all of these classes follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from nerite.config.field_types import Int32, Int64, Uint32

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
