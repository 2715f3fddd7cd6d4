"""What a model's ``auto_complete_config`` says, put into its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nerite.backends.python.failure import CAUSES, refusal
from nerite.core.errors import Internal
from triton_python_backend_utils import ModelConfig

_SCHEDULERS = frozenset({"dynamic_batching", "sequence_batching", "ensemble_scheduling"})
_FREE = frozenset({"max_batch_size", "input", "output", "model_transaction_policy"})


def completed(name: str, config: Mapping[str, Any], model_class: type) -> Mapping[str, Any]:
    """Return ``config`` as the model completes it, or as it is if the model has nothing to say.

    Only what a model may change is taken over: max_batch_size, inputs, outputs, decoupled, and the scheduler where none
    was configured. Raises ``Internal`` with the model's error.
    """
    hook = getattr(model_class, "auto_complete_config", None)
    if hook is None:
        return config
    try:
        answer = hook(ModelConfig(json.dumps(config)))
        said = json.loads(json.dumps(answer.as_dict())) if isinstance(answer, ModelConfig) else None
    except CAUSES as error:
        raise refusal(error) from error
    if said is None:
        raise Internal(f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object.")
    changeable = _FREE if _SCHEDULERS & config.keys() else _FREE | _SCHEDULERS
    kept = {key: value for key, value in config.items() if key not in changeable}
    return kept | {key: value for key, value in said.items() if key in changeable}
