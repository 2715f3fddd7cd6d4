"""Messages of external processing (ext_proc.proto)."""

from nerite.wire.schema import members_of

__getattr__ = members_of("ext_proc")
