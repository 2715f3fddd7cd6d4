"""How a pool chooses its members: the settings of ``PoolBalancer``, each with the default of ``cluster.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nerite.core.errors import InvalidArgument


class ChoicePolicy(StrEnum):
    """Which of several members gets a request that none of them has an advantage for."""

    LEAST_WORK = "least-work"
    """The one with the least expected work. Among members whose load is not known exactly, the better of two."""
    POWER_OF_TWO = "power-of-two"
    """The better of two that are drawn at random."""
    ROUND_ROBIN = "round-robin"
    """The next one, whatever its load. Sequences stay on their members; there is no other affinity."""


@dataclass(frozen=True)
class PoolPolicy:
    """Settings of a pool's balancer. Raises ``InvalidArgument`` for values that have no meaning."""

    choice: ChoicePolicy = ChoicePolicy.LEAST_WORK
    prefix: bool = True
    """Requests go to members that have seen the beginnings of their prompts."""
    load_factor: float = 1.25
    """Affinity gives no member more than this multiple of the mean load, but for what it saves by that."""
    index_bytes: int = 64 * 1024 * 1024
    """Memory for what is known of prompts, sessions and adapters; the same amount bounds each pool."""
    prefill_weight: float = 0.25
    """Work of a token of the prompt that is not cached, in tokens of an answer."""
    adapter_tokens: float = 256.0
    """Work of loading a LoRA adapter, in tokens of an answer."""
    max_requests: float = 0.0
    """Requests under way for each unit of a member's capacity, above which it is full. 0: no limit."""
    max_sequences: int = 65_536
    """Sequences that are kept on their members at once."""
    sequence_idle: float = 3600.0
    """Seconds after whose last request a sequence is forgotten."""
    retry_share: float = 0.1
    """Retries and hedges for each request; 0: none beyond the floor."""
    retry_floor: float = 3.0
    """Retries a second that are always allowed."""
    hedge_quantile: float = 0.0
    """Tensor requests without an answer after this quantile of their model's latency are sent again. 0: none."""
    ejection: EjectionPolicy | None = None
    """How failing members are taken out; None: the defaults of ``EjectionPolicy``."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(
            self,
            load_factor=(1.0, 100.0),
            index_bytes=(64 * 1024, 2**40),
            prefill_weight=(0.0, 100.0),
            adapter_tokens=(0.0, 1e9),
            max_requests=(0.0, 1e9),
            max_sequences=(1, 1e9),
            sequence_idle=(1.0, 1e9),
            retry_share=(0.0, 1.0),
            retry_floor=(0.0, 1e6),
            hedge_quantile=(0.0, 0.9999),
        )


@dataclass(frozen=True)
class EjectionPolicy:
    """When a member that fails gets no requests for a while (outlier detection, with Envoy's words)."""

    consecutive_failures: int = 5
    """So many failures in a row eject it. 0: they never do."""
    failure_ratio: float = 0.3
    """It is ejected when this share of its requests in an interval fails beyond the share of the others. 0: never."""
    request_volume: int = 20
    """Requests that a member must have had in an interval for its share of failures to count."""
    interval: float = 10.0
    """Seconds over which shares are counted."""
    base_ejection: float = 5.0
    """Seconds of the first ejection. Each further one lasts twice as long."""
    max_ejection: float = 300.0
    """Seconds of the longest ejection."""
    max_ejected: float = 0.5
    """Largest share of the members that are out at the same time. The last member is never ejected."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(
            self,
            consecutive_failures=(0, 1e6),
            failure_ratio=(0.0, 1.0),
            request_volume=(1, 1e9),
            interval=(0.1, 86_400.0),
            base_ejection=(0.1, 86_400.0),
            max_ejection=(0.1, 86_400.0),
            max_ejected=(0.0, 1.0),
        )


def check_ranges(settings: object, **ranges: tuple[float, float]) -> None:
    """Raise ``InvalidArgument`` for the first attribute that is outside of its range, or is not a number."""
    for name, (least, most) in ranges.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            raise InvalidArgument(f"{name.replace('_', '-')} is {value:g}: it must be from {least:g} to {most:g}")
