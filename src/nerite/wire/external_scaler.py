"""Messages of KEDA's external scaler (external_scaler.proto)."""

from nerite.wire.schema import members_of

__getattr__ = members_of("external_scaler")
