"""How one request of a judged route ended: what the judge of a rollout is given."""

from __future__ import annotations

from typing import NamedTuple


class Stratum(NamedTuple):
    """Class of comparable requests: a judge compares arms within it, so that a change of mix does not mislead it."""

    prompt: int
    """Class of the prompt's length, or of the request's size."""
    cached: int
    """Class of the number of prompt tokens that were in the engine's prefix cache."""
    tenant: str
    """Tenant, or its class; empty if no policy is in force."""
    stream: bool
    """The caller gets its answer in several responses."""


class Outcome(NamedTuple):
    """How one request of a judged route ended."""

    candidate: bool
    """It was assigned to the candidate arm first, even if the other arm has answered it."""
    probability: float
    """Probability with which the router assigned it to the candidate."""
    at_ns: int
    """End of the request (``time.monotonic_ns``)."""
    latency_us: float
    """From the arrival to the last response."""
    first_us: float
    """From the arrival to the first response; equal to ``latency_us`` for a single response."""
    token_us: float
    """Mean time between two responses; 0 if there were fewer than two."""
    error: str
    """Empty, ``error``, ``timeout``, ``refused`` or ``cancelled``."""
    stratum: Stratum
    cluster: int
    """Hash of the sticky key: requests with one key are not independent; 0 without a key."""
