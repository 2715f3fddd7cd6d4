"""From a configuration to the scheduler that it chooses."""

from __future__ import annotations

import os
from pathlib import Path

from nerite.config.model_config import ModelConfig
from nerite.config.scheduling_choice import ModelDynamicBatching, ModelQueuePolicy, ModelSequenceBatching
from nerite.core.errors import InvalidArgument
from nerite.execution.any_instance import AnyInstance
from nerite.execution.roster import SelectiveRoster
from nerite.execution.sequence_dress import SequenceDress
from nerite.execution.sequence_roster import SequenceRoster
from nerite.scheduling.dynamic_batcher import DynamicBatcher
from nerite.scheduling.one_by_one import OneByOne
from nerite.scheduling.policy import BatchingRules, QueuePolicy
from nerite.scheduling.sequence_rules import SequenceRules


def roster(config: ModelConfig, directory: Path) -> SelectiveRoster:
    """Return the scheduler of a model that lies in ``directory``. Blocks.

    Raises ``NeriteError`` for one there is no code for yet, and where a file that it needs is not right.
    """
    hold = _hold("TRITONSERVER_DELAY_SCHEDULER")
    if config.ensemble_scheduling is not None:
        raise InvalidArgument(
            f"model '{config.name}' uses 'ensemble_scheduling', which this version of the server does not offer"
        )
    if config.sequence_batching is not None:
        dress = SequenceDress(config, directory)
        return SequenceRoster(config, dress, _sequence_rules(config, config.sequence_batching, hold))
    if config.dynamic_batching is not None:
        return AnyInstance(DynamicBatcher(_batching_rules(config, config.dynamic_batching, hold)))
    return AnyInstance(OneByOne(hold))


def preserves_ordering(config: ModelConfig) -> bool:
    """Return whether answers are to leave in the order of the executions."""
    batching = config.sequence_batching.oldest if config.sequence_batching is not None else config.dynamic_batching
    return batching is not None and batching.preserve_ordering


def _batching_rules(config: ModelConfig, batching: ModelDynamicBatching, hold: int) -> BatchingRules:
    default = batching.default_queue_policy
    return BatchingRules(
        max_batch_size=config.max_batch_size,
        preferred_sizes=tuple(batching.preferred_batch_size),
        max_delay_us=batching.max_queue_delay_microseconds,
        levels=batching.priority_levels,
        default_level=batching.default_priority_level,
        default_policy=_policy(default) if default else QueuePolicy(),
        policies={level: _policy(policy) for level, policy in batching.priority_queue_policy.items()},
        hold_until=hold,
    )


def _sequence_rules(config: ModelConfig, batching: ModelSequenceBatching, hold: int) -> SequenceRules:
    oldest, direct = batching.oldest, batching.direct
    return SequenceRules(
        model=config.name,
        slots=max(1, config.max_batch_size if oldest is None else oldest.max_candidate_sequences),
        max_idle_us=batching.max_sequence_idle_microseconds,
        batching=None
        if oldest is None
        else BatchingRules(
            max_batch_size=config.max_batch_size,
            preferred_sizes=tuple(oldest.preferred_batch_size),
            max_delay_us=oldest.max_queue_delay_microseconds,
            hold_until=hold,
        ),
        max_delay_us=direct.max_queue_delay_microseconds if direct else 0,
        min_utilization=direct.minimum_slot_utilization if direct else 0.0,
        hold_until=0 if oldest else hold,
        hold_until_backlog=_hold("TRITONSERVER_BACKLOG_DELAY_SCHEDULER"),
    )


def _hold(variable: str) -> int:
    """Return how many requests are to wait before a scheduler starts. Hooks that Triton's tests rely on."""
    return int(os.environ.get(variable, "0") or 0)


def _policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout_us=policy.default_timeout_microseconds,
        allow_override=policy.allow_timeout_override,
        delay_on_timeout=policy.timeout_action == "DELAY",
        max_size=policy.max_queue_size,
    )
