"""What requests to a model with sequences have to say."""

from __future__ import annotations

from nerite.config.model_config import ModelConfig
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import RequestHeader, labelled


class SequenceTerms:
    """The terms of one model, whose configuration is complete, valid, and chooses sequence batching."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._control = _id_control(config)

    def refusal(self, header: RequestHeader, sequence_id: int | str, request_id: str) -> NeriteError | None:
        """Return what is wrong with a request that is to be part of a sequence.

        ``sequence_id`` is the one of ``header``, or one that the server has given it.
        """
        if self._control is not None and (header.sequence_id or not sequence_id):
            name, expected = self._control
            given = dtypes.BYTES if isinstance(header.sequence_id, str) else dtypes.UINT64
            if (given is dtypes.BYTES) is not (expected is dtypes.BYTES):
                send = "a string" if expected is dtypes.BYTES else "a number"
                refusal = InvalidArgument(
                    f"sequence batching control '{name}' data-type is '{given.name}', but model '{self._model}' "
                    f"expects '{expected.name}' (send {send} as sequence_id, or change data_type of the control)"
                )
                return labelled(refusal, request_id)
        if header.batch_size > 1:
            return InvalidArgument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        if not sequence_id:
            return InvalidArgument(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        return None


def _id_control(config: ModelConfig) -> tuple[str, DataType] | None:
    """Return name and type of the control that tells the model the correlation id, if there is one."""
    assert config.sequence_batching is not None
    for tensor in config.sequence_batching.control_input:
        for control in tensor.control:
            if control.kind == "CONTROL_SEQUENCE_CORRID":
                return tensor.name, dtypes.BY_CONFIG_NAME[control.data_type]
    return None
