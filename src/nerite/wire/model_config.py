"""Messages of a model's configuration (model_config.proto)."""

from nerite.wire.schema import members_of

__getattr__ = members_of("model_config")
