"""The settings of autoscaling: table ``[pool.scaling]`` of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nerite.balancing.policy import check_ranges
from nerite.core.errors import InvalidArgument

MOST_MEMBERS: Final = 1024
"""The largest number of members that autoscaling may want for a pool."""
_LONGEST: Final = 86_400.0


@dataclass(frozen=True)
class ScalingPolicy:
    """When a pool gets more or fewer members. Raises ``InvalidArgument`` for values that have no meaning.

    Durations are in seconds; 0 means that a target is not given. At least one target has to be.
    """

    least: int = 1
    """The smallest number of members; 0: none while there are no requests."""
    most: int = 1
    """The largest number of members."""
    warm: int = 0
    """Further processes that are started and have loaded no model, to be woken at once."""
    headroom: float = 0.2
    """Share of the demand for which there is capacity beyond the demand."""
    idle: float = 300.0
    """Time without a request after which the pool has no members any more, if ``least`` is 0."""
    stabilization: float = 120.0
    """Fewer members are wanted only when fewer would have been enough for so long."""
    step: float = 2.0
    """The number of members grows by at most this factor within 15 s, or by 4."""
    ttft: float = 0.0
    """Promise: time from the arrival of a request to the first token of its answer."""
    itl: float = 0.0
    """Promise: mean time between the tokens of an answer."""
    latency: float = 0.0
    """Promise: time from the arrival of a request to the end of its answer."""
    share: float = 0.95
    """Share of the answers that keep the promises."""
    rate: float = 0.0
    """Target: work that a member does in a second, in tokens; a tensor request counts as one."""
    concurrency: float = 0.0
    """Target: requests of a member at the same time."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        times = dict.fromkeys(("ttft", "itl", "latency", "stabilization"), (0.0, _LONGEST))
        check_ranges(
            self,
            least=(0, MOST_MEMBERS),
            most=(1, MOST_MEMBERS),
            warm=(0, MOST_MEMBERS),
            headroom=(0.0, 10.0),
            idle=(1.0, _LONGEST),
            step=(1.1, 100.0),
            share=(0.5, 0.9999),
            rate=(0.0, 1e12),
            concurrency=(0.0, 1e6),
            **times,
        )
        if self.most < self.least:
            raise InvalidArgument(f"max is {self.most}, less than min, {self.least}: raise max")
        if not (self.promises or self.rate or self.concurrency):
            raise InvalidArgument(
                "there is no target: write a promise, as in ttft or latency = 500ms, or rate or concurrency of a member"
            )

    @property
    def promises(self) -> bool:
        """Whether there is a promise whose keeping is observed."""
        return bool(self.ttft or self.itl or self.latency)

    def bounded(self, members: int) -> int:
        """Return the number of members within the bounds."""
        return min(max(members, self.least), self.most)
