"""The defaults that depend on other fields or on the machine. Pure: a configuration in, a configuration out."""

from __future__ import annotations

import dataclasses
from typing import Final

from nerite.config.gpus import Gpus
from nerite.config.model_config import (
    InstanceKind,
    ModelConfig,
    ModelInstanceGroup,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    VersionPolicyLatest,
)
from nerite.config.optimization import ModelOptimizationPolicy, PinnedMemoryBuffer
from nerite.config.scheduling_choice import ModelDynamicBatching, ModelSequenceBatching

IDLE_DEFAULT_MICROSECONDS: Final = 1_000_000
_ON_CPU_UNLESS_TOLD: Final = frozenset({"fil", "litert", "openvino"})
"""Backends that prefer the CPU even where there are GPUs."""
_TWO_ON_CPU: Final = frozenset({"tensorflow", "onnxruntime"})
"""Backends that have two instances on the CPU by default."""


def normalise(config: ModelConfig) -> ModelConfig:
    """Return ``config`` with version policy, batching and optimisation filled in. Idempotent."""
    config = dataclasses.replace(
        config,
        version_policy=config.version_policy or ModelVersionPolicy(latest=VersionPolicyLatest(num_versions=1)),
        dynamic_batching=_dynamic(config.dynamic_batching, config.max_batch_size),
        sequence_batching=_sequence(config.sequence_batching, config.max_batch_size),
    )
    if config.ensemble_scheduling is None:
        return dataclasses.replace(config, optimization=_optimization(config.optimization))
    # An ensemble always says whether it is decoupled; that it is follows from its models.
    policy = config.model_transaction_policy or ModelTransactionPolicy()
    return dataclasses.replace(config, model_transaction_policy=policy)


def normalise_instances(config: ModelConfig, gpus: Gpus) -> ModelConfig:
    """Return ``config`` with its instance groups filled in for a machine that has ``gpus``. Idempotent."""
    if config.ensemble_scheduling is not None:
        return config
    groups = config.instance_group or (ModelInstanceGroup(name=config.name, kind=_preferred(config.backend)),)
    filled = tuple(_group(config, index, group, gpus) for index, group in enumerate(groups))
    return dataclasses.replace(config, instance_group=filled)


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
    pinned = PinnedMemoryBuffer(enable=True)
    return dataclasses.replace(
        policy,
        input_pinned_memory=policy.input_pinned_memory or pinned,
        output_pinned_memory=policy.output_pinned_memory or pinned,
    )


def _preferred(backend: str) -> InstanceKind:
    return "KIND_CPU" if backend in _ON_CPU_UNLESS_TOLD else "KIND_AUTO"


def _group(config: ModelConfig, index: int, group: ModelInstanceGroup, gpus: Gpus) -> ModelInstanceGroup:
    kind = group.kind
    if kind == "KIND_AUTO":
        on_gpus = gpus.numbers and gpus.preferred and set(group.gpus) <= set(gpus.numbers)
        kind = "KIND_GPU" if on_gpus else "KIND_CPU"
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
