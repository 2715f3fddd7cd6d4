"""Messages of the health service (health.proto)."""

from nerite.wire.schema import members_of

__getattr__ = members_of("health")
