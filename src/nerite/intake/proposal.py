"""What settings follow from what was measured. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nerite.config.model_config import ModelConfig, ModelInstanceGroup
from nerite.config.scheduling_choice import ModelDynamicBatching
from nerite.intake.contest import Verdict
from nerite.intake.measurement import Latency, Throughput

_NEARLY_BEST: Final = 0.9
"""The smallest batch with this part of the best rate is large enough: a larger one has callers wait for little."""
_GAIN: Final = 1.1
"""Batches that are not better by this factor are not worth their wait."""
_STANDS_OUT: Final = 1.25
_INSTANCES_GAIN: Final = 1.15


@dataclass(frozen=True)
class Advice:
    """One setting: what it is to be, and the figures that say so."""

    setting: str
    value: str
    """Empty: it is left out."""
    reason: str


@dataclass(frozen=True)
class Proposal:
    """Settings for a model."""

    max_batch_size: int
    dynamic_batching: ModelDynamicBatching | None
    instances: int
    """0: nothing is said about them."""
    advice: tuple[Advice, ...]
    backend: str = ""
    """Empty: nothing is said about it."""

    def applied(self, config: ModelConfig) -> ModelConfig:
        """Return ``config`` with these settings."""
        groups = (ModelInstanceGroup(count=self.instances),) if self.instances > 1 else config.instance_group
        if self.backend and self.backend != config.backend:
            # A platform is another name for the backend that it was.
            config = dataclasses.replace(config, backend=self.backend, platform="")
        return dataclasses.replace(
            config,
            max_batch_size=self.max_batch_size,
            dynamic_batching=self.dynamic_batching,
            instance_group=groups,
        )


def propose(
    config: ModelConfig, measured: Sequence[Latency], instances: Sequence[Throughput], contest: Verdict | None = None
) -> Proposal:
    """Return the settings that follow from latencies by batch and rates by number of instances.

    With a ``contest`` both are those of the backend that won it.
    """
    advice: list[Advice] = []
    if contest is not None:
        advice.append(Advice("backend", f'"{contest.winner.backend}"', contest.reason))
    largest, batching = config.max_batch_size, config.dynamic_batching
    if largest > 0 and len(measured) > 1:
        largest, batching = _batches(config, measured, advice)
    count = _instances(instances, advice) if len(instances) > 1 else 0
    backend = contest.winner.backend if contest is not None else ""
    return Proposal(largest, batching, count, tuple(advice), backend)


def _batches(
    config: ModelConfig, measured: Sequence[Latency], advice: list[Advice]
) -> tuple[int, ModelDynamicBatching | None]:
    alone = measured[0]
    best = max(measured, key=lambda each: each.per_second)
    enough = next(each for each in measured if each.per_second >= _NEARLY_BEST * best.per_second)
    if best.per_second < _GAIN * alone.per_second:
        figures = f"{_rate(best)} at best with {best.batch}, {_rate(alone)} with 1"
        advice.append(Advice("dynamic_batching", "", f"batches gain nothing, {figures}"))
        return config.max_batch_size, None
    gain = f"{_rate(enough)} in {enough.ms:.1f} ms, where 1 has {_rate(alone)} in {alone.ms:.1f} ms"
    more = f"; {best.batch} would have {_rate(best)} in {best.ms:.1f} ms" if best is not enough else ""
    advice.append(Advice("max_batch_size", str(enough.batch), gain + more))
    favourites = tuple(_favourites([each for each in measured if each.batch <= enough.batch]))
    known = config.dynamic_batching or ModelDynamicBatching()
    advice.append(
        Advice("dynamic_batching", "{ }", "what comes while the model is busy is the next batch; no delay is needed")
    )
    if favourites:
        reason = "these stand out among their neighbours by a quarter and more"
        advice.append(Advice("preferred_batch_size", f"[ {', '.join(map(str, favourites))} ]", reason))
    else:
        advice.append(Advice("preferred_batch_size", "", "no size stands out among its neighbours"))
    return enough.batch, dataclasses.replace(known, preferred_batch_size=favourites)


def _favourites(measured: Sequence[Latency]) -> list[int]:
    """Return the sizes that are much better than the next smaller and the next larger one."""
    return [
        each.batch
        for before, each, after in zip(measured, measured[1:], measured[2:], strict=False)
        if each.per_second > _STANDS_OUT * max(before.per_second, after.per_second)
    ]


def _instances(measured: Sequence[Throughput], advice: list[Advice]) -> int:
    one = measured[0]
    best = max(measured, key=lambda each: each.per_second)
    figures = ", ".join(f"{each.per_second:,.0f}/s with {each.instances}" for each in measured)
    if best.per_second < _INSTANCES_GAIN * one.per_second:
        advice.append(Advice("instance_group", "", f"more instances gain little: {figures}"))
        return 1
    enough = next(each for each in measured if each.per_second >= _NEARLY_BEST * best.per_second)
    advice.append(Advice("instance_group", f"[ {{ count: {enough.instances} }} ]", figures))
    return enough.instances


def _rate(measured: Latency) -> str:
    return f"{measured.per_second:,.0f}/s"
