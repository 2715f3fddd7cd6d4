"""A configuration's tensors, from shapes as people and metadata write them: with the batch in front."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from nerite.client import TensorDescription
from nerite.config.model_config import ModelConfig
from nerite.config.tensors import ModelInput, ModelOutput, ModelTensorReshape
from nerite.core import dtype as dtypes

_MAX_BATCH: Final = 4
"""To begin with; what is measured may raise it."""


def declared(
    config: ModelConfig, inputs: Sequence[TensorDescription], outputs: Sequence[TensorDescription]
) -> ModelConfig:
    """Return ``config`` with these inputs and outputs. Where all begin with a free size, that is the batch."""
    batching = all(tensor.shape[:1] == (-1,) for tensor in (*inputs, *outputs))
    return dataclasses.replace(
        config,
        max_batch_size=_MAX_BATCH if batching else 0,
        input=tuple(ModelInput(**_entry(tensor, batching)) for tensor in inputs),
        output=tuple(ModelOutput(**_entry(tensor, batching)) for tensor in outputs),
    )


def _entry(tensor: TensorDescription, batching: bool) -> dict[str, Any]:
    dims = tensor.shape[1:] if batching else tensor.shape
    entry: dict[str, Any] = {
        "name": tensor.name,
        "data_type": dtypes.BY_NAME[tensor.datatype].config_name,
        "dims": dims or (1,),
    }
    if not dims:
        # A configuration cannot say that there is nothing but the batch: it says 1, and that the model wants less.
        entry["reshape"] = ModelTensorReshape()
    return entry
