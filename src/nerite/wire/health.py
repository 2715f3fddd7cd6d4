"""The health service's messages: see health.proto."""

from nerite.wire.schema import members_of

__getattr__ = members_of("health")
