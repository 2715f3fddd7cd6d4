"""The three ways to schedule a model, as typed data: dynamic batching, sequence batching, an ensemble.

See ``model_config.py`` for the conventions that all of these classes follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from nerite.config.field_types import DataTypeName, Int32, Int64, Single, Uint32, Uint64

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
