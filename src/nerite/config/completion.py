"""What a backend's own completion of a configuration may change, whatever it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from nerite.config.json_form import from_json
from nerite.config.model_config import ModelConfig, ModelTransactionPolicy
from nerite.config.normalise import normalise
from nerite.core.errors import Internal

Complete: TypeAlias = Callable[[ModelConfig, int], Mapping[str, Any] | None]
"""Completes a configuration from the artifact of a version: the whole configuration in JSON form, or None where the
backend has nothing to say. Raises ``NeriteError`` where the two contradict each other, ``CompletionUnavailable`` where
there is nobody to ask."""

_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


class CompletionUnavailable(Exception):
    """The artifact cannot be looked at here, which says nothing about the configuration. ``str()`` says why."""


def apply_completion(config: ModelConfig, completed: Mapping[str, Any]) -> ModelConfig:
    """Return ``config`` with what ``completed`` says about batch size, tensors, scheduling and decoupling; normalised.

    The scheduler is taken over only where none is set. Raises ``Internal`` if ``completed`` has another one,
    ``InvalidArgument`` if it is no configuration.
    """
    given = from_json(completed)
    before, after = _scheduler(config), _scheduler(given)
    if before and before != after:
        raise Internal(f"Cannot update scheduling choice from {before} to {after or 'none'} when auto-completing.")
    changes: dict[str, Any] = {
        "max_batch_size": given.max_batch_size,
        "input": given.input,
        "output": given.output,
    }
    if after and not before:
        changes[after] = getattr(given, after)
    if given.model_transaction_policy is not None:
        decoupled = given.model_transaction_policy.decoupled
        changes["model_transaction_policy"] = ModelTransactionPolicy(decoupled=decoupled)
    return normalise(dataclasses.replace(config, **changes))


def _scheduler(config: ModelConfig) -> str:
    return next((name for name in _SCHEDULERS if getattr(config, name) is not None), "")
