"""The instances that the instance groups of a model ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nerite.backends.interface import InstanceContext
from nerite.config.model_config import ModelConfig, ModelInstanceGroup
from nerite.execution.host_policy import HostPolicies
from nerite.scheduling.rate_limiter import EVERYWHERE, Claim, Pool


@dataclass(frozen=True)
class InstancePlan:
    """One instance: what its backend is told, and what is asked of it. Equal plans make equal instances."""

    context: InstanceContext
    passive: bool
    """It is there, and gets no requests."""
    claim: Claim
    """What it needs to execute, where executions are limited."""


def instance_plans(config: ModelConfig, policies: HostPolicies) -> list[InstancePlan]:
    """Return the instances that a model has. Raises ``NeriteError`` for a host policy that cannot be followed."""
    plans = [plan for group in config.instance_group for plan in _of_group(group, policies)]
    sharing = Counter(plan.context.cores for plan in plans)
    return [replace(plan, context=replace(plan.context, sharing=sharing[plan.context.cores])) for plan in plans]


def _of_group(group: ModelInstanceGroup, policies: HostPolicies) -> Iterator[InstancePlan]:
    kind = group.kind.removeprefix("KIND_")
    count = max(group.count, 1)
    for index, device in enumerate(group.gpus or (0,)):
        place = policies.place(group.host_policy or (f"gpu_{device}" if kind == "GPU" else kind.lower()))
        claim = _claim(group, device)
        for number in range(index * count, (index + 1) * count):
            context = InstanceContext(f"{group.name}_{number}", kind, device, *place)
            yield InstancePlan(context, group.passive, claim)


def _claim(group: ModelInstanceGroup, device: int) -> Claim:
    limiter = group.rate_limiter
    if limiter is None:
        return Claim()
    # Where a resource is named twice, the second time holds.
    needs = {Pool(each.name, EVERYWHERE if each.global_ else device): each.count for each in limiter.resources}
    return Claim(tuple((pool, count) for pool, count in needs.items() if count), limiter.priority)
