"""The refusals of a gate, in words."""

from __future__ import annotations

from nerite.scheduling.tokens.policy import PriorityClass, Tenant
from nerite.scheduling.tokens.refusal import Fault, Limit, Refusal, pause


def closed(of: str, running: int) -> Refusal:
    """Say that a server stops."""
    return Refusal(
        limit=Limit.DRAINING,
        fault=Fault.LOAD,
        of=of,
        value="on",
        use=f"{running} running",
        text="no more requests are taken",
        retry_after=1,
    )


def no_class(tenant: Tenant, wanted: str) -> Refusal:
    """Say that a class is none, or matters more than that of the tenant."""
    return Refusal(
        limit=Limit.CLASS,
        fault=Fault.CLIENT,
        of=f"tenant '{tenant.name}'",
        value=tenant.level,
        use=f"'{wanted}'",
        text="the class that is asked for is none that this tenant may have",
    )


def full(limit: Limit, of: str, value: int, use: int, work: float | None) -> Refusal:
    """Say that too much waits, nanoseconds of ``work`` as far as that is known."""
    return Refusal(
        limit=limit,
        fault=Fault.LOAD,
        of=of,
        value=value,
        use=use,
        text="too much waits already",
        retry_after=pause(work or 0.0),
    )


def slow(level: PriorityClass, takes: float, beyond: float | None) -> Refusal:
    """Say that what a class promises cannot be kept: it takes nanoseconds, so many of them too long."""
    return Refusal(
        limit=Limit.FIRST_TOKEN,
        fault=Fault.LOAD,
        of=f"class '{level.name}'",
        value=level.ttft_seconds,
        use=takes / 1e9,
        text="the first token would come too late",
        retry_after=pause(beyond or 0.0),
    )


def late(left: float, takes: float) -> Refusal:
    """Say that a deadline cannot be met, or was not; both are nanoseconds."""
    return Refusal(
        limit=Limit.DEADLINE,
        fault=Fault.TIME,
        of="the request",
        value=left / 1e9,
        use=takes / 1e9,
        text="the answer would be complete too late, in seconds",
    )
