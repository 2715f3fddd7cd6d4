"""What is asked of each configuration, and for how long."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from nerite.bench.measurement import Rule
from nerite.bench.preparation import Wanted
from nerite.config.model_config import ModelConfig

_SEQUENCE: Final = 20
"""Requests of a sequence where nobody says how many: as of perf_analyzer."""


@dataclass(frozen=True)
class Load:
    """Models that are asked at once, each by so many callers as a level says."""

    asked: tuple[Wanted, ...]
    concurrencies: tuple[int, ...]
    rule: Rule
    warm_up: float
    protocol: Literal["http", "grpc"] = "http"
    beside: tuple[str, ...] = ()
    """Models that are not asked, but called by those that are."""

    @property
    def models(self) -> tuple[str, ...]:
        """The models that are to be loaded."""
        return (*(wanted.model for wanted in self.asked), *self.beside)

    def fitted(self, configs: Mapping[str, ModelConfig]) -> Load:
        """Return it with what follows from the models' configurations: streams, sequences, and whose shape is whose."""
        fitted = [_fitted(wanted, configs[wanted.model], several=len(self.asked) > 1) for wanted in self.asked]
        return dataclasses.replace(self, asked=tuple(fitted))

    def to_json(self) -> dict[str, Any]:
        """Return all that figures depend on."""
        return {
            **{wanted.model: _told(wanted) for wanted in self.asked},
            "beside": list(self.beside),
            "protocol": self.protocol,
            "concurrencies": list(self.concurrencies),
            "warm-up": self.warm_up,
            "window": self.rule.seconds,
            "windows": self.rule.most,
            "stability": self.rule.percentage,
        }


def _fitted(wanted: Wanted, config: ModelConfig, *, several: bool) -> Wanted:
    policy = config.model_transaction_policy
    streaming = wanted.streaming or (policy is not None and policy.decoupled)
    length = wanted.sequence_length or (_SEQUENCE if config.sequence_batching is not None else 0)
    shapes = wanted.shapes
    if several:
        # Of several models each has its own inputs; they are named with the model, where another has the same name.
        names = {name: each.name for each in config.input for name in (each.name, f"{config.name}.{each.name}")}
        shapes = {names[name]: sizes for name, sizes in shapes.items() if name in names}
    return dataclasses.replace(wanted, streaming=streaming, sequence_length=length, shapes=shapes)


def _told(wanted: Wanted) -> dict[str, Any]:
    return {
        "batch": wanted.batch,
        "shapes": {name: list(sizes) for name, sizes in wanted.shapes.items()},
        "data": str(wanted.data),
        "parameters": dict(wanted.parameters),
        "streaming": wanted.streaming,
        "sequence": wanted.sequence_length,
    }
