"""Who may use how much of which model, as plain data. ``policy_file`` reads it from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

EVERYBODY: Final = "default"
"""The name of the tenant that all are who are nobody else. They share one account."""
ANY_MODEL: Final = "*"


@dataclass(frozen=True, slots=True)
class KeepLimits:
    """How much is kept, over all models, and how long."""

    grace_ns: int = 30_000_000_000
    """0: nothing is kept for somebody who is not there."""
    max_answers: int = 1000
    """Complete ones."""
    max_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """Requests that matter alike."""

    name: str = EVERYBODY
    order: int = 0
    """The smaller, the more it matters: the class of the largest is shed first."""
    share: int = 1
    """What part of a model it has while other classes wait as well, compared with theirs."""
    ttft_seconds: float = 0.0
    """The first token is promised within this time. Whom that cannot be promised is refused. 0: no promise."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a bucket gives."""

    per_minute: int = 0
    """0: no limit."""
    burst: int = 0
    """What may be used at once after a rest."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody who has a share of his own."""

    name: str = EVERYBODY
    level: str = EVERYBODY
    """The name of its class. A request may ask for one that matters less, never for one that matters more."""
    weight: int = 1
    """What part of its class it has while other tenants wait as well, compared with theirs."""
    input_tokens: Rate = Rate()
    output_tokens: Rate = Rate()
    requests: Rate = Rate()
    bytes: Rate = Rate()
    concurrency: int = 0
    """Requests under way, those that wait included. 0: any number."""
    retry_fraction: float = 1.0
    """Of its requests as many may be retries."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What one request may ask of a model, and how many there may be. 0: no limit."""

    tokens: bool = True
    """It is an LLM. The sizes of any other model are bytes, and it has no output."""
    max_input: int = 0
    max_output: int = 0
    context_window: int = 0
    max_running: int = 0
    """Sequences that an engine runs at once, or requests that another model executes."""
    queue_length: int = 1000
    queue_size: int = 0
    """Tokens (input, and what is expected of output) or bytes that may wait."""
    overcommit: float = 0.0
    """The part of the KV blocks that may be promised though it is not there."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The whole file. The empty one limits nothing but the length of queues."""

    classes: Mapping[str, PriorityClass] = field(default_factory=lambda: {EVERYBODY: PriorityClass()})
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    everybody: Tenant = Tenant()
    header: str = ""
    """The name of a header, in lower case, whose value says who somebody is. Empty: keys alone do."""
    names: Mapping[str, str] = field(default_factory=dict)
    """From a value of the header to the name of a tenant."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """From the SHA-256 of a key, in hexadecimal, to the name of a tenant."""
    llms: Mapping[str, ModelLimits] = field(default_factory=dict)
    models: Mapping[str, ModelLimits] = field(default_factory=dict)
    keeping: KeepLimits = field(default_factory=KeepLimits)
    """Of answers with an idempotency key."""

    def tenant_of(self, key: str = "", value: str = "") -> Tenant:
        """Return who sends ``key``, or else ``value`` in the header."""
        name = self.digests.get(digest_of(key), "") if key else ""
        return self.tenants.get(name or self.names.get(value, ""), self.everybody)

    def tenant(self, name: str) -> Tenant:
        """Return a tenant by its name."""
        return self.tenants.get(name, self.everybody)

    def class_of(self, tenant: Tenant, wanted: str = "") -> PriorityClass | None:
        """Return the class of a request; None if ``wanted`` is none that this tenant may have."""
        own = self.classes[tenant.level]
        if not wanted:
            return own
        other = self.classes.get(wanted)
        return other if other is not None and other.order >= own.order else None

    def limits_of(self, model: str, tokens: bool = True) -> ModelLimits:
        """Return the limits of an LLM, or of another model."""
        table = self.llms if tokens else self.models
        return table.get(model) or table.get(ANY_MODEL) or ModelLimits(tokens=tokens)


def digest_of(key: str) -> str:
    """Return what stands for a key wherever it is kept."""
    return hashlib.sha256(key.encode()).hexdigest()
