"""What requests to a model with sequences have to say."""

from __future__ import annotations

from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import RequestHeader


class SequenceTerms:
    """The terms of one model, whose configuration is complete, valid, and chooses sequence batching."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._numeric = _numeric_id(config)

    def refusal(self, header: RequestHeader, sequence_id: int | str) -> NeriteError | None:
        """Return what is wrong with a request that is to be part of a sequence."""
        if header.batch_size > 1:
            return InvalidArgument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        if not sequence_id:
            return InvalidArgument(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        if self._numeric is not None and isinstance(header.sequence_id, str):
            name, data_type = self._numeric
            return InvalidArgument(
                f"sequence batching control '{name}' data-type is '{data_type}', but model '{self._model}' expects "
                f"'TYPE_STRING' for the correlation ID '{header.sequence_id}'; send a number, or have the control be "
                "TYPE_STRING"
            )
        return None


def _numeric_id(config: ModelConfig) -> tuple[str, str] | None:
    """Return name and type of the control that tells the model a correlation id which has to be a number."""
    assert config.sequence_batching is not None
    for tensor in config.sequence_batching.control_input:
        for control in tensor.control:
            if control.kind == "CONTROL_SEQUENCE_CORRID" and control.data_type != "TYPE_STRING":
                return tensor.name, control.data_type
    return None
