"""A config.pbtxt to read: each part with a line that says what it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from nerite.config.model_config import ModelConfig
from nerite.config.text_form import to_text

_DIMS: Final = "-1 is any size"
_EXPLAINED: Final = {
    "platform": "The format of the model's file.",
    "backend": "What runs the model.",
    "runtime": "The program that runs it.",
    "max_batch_size": "The largest batch. Tensors have the batch as one more dimension in front of their dims.",
    "input": f"What a request brings; {_DIMS}.",
    "output": f"What it gets; {_DIMS}.",
    "batch_input": "Inputs that the server makes for each batch.",
    "batch_output": "How outputs of a batch are divided.",
    "dynamic_batching": "Requests that come while the model is busy run together as the next batch.",
    "sequence_batching": "Requests of one sequence go to one instance, in their order.",
    "ensemble_scheduling": "The models that it is made of.",
    "instance_group": "Copies of the model, which run at the same time.",
    "default_model_filename": "The model's file, in the directory of each version.",
    "parameters": "What the backend is told.",
    "model_transaction_policy": "Whether a request has any number of responses.",
    "response_cache": "Whether answers are kept, and given again to equal requests.",
}
_NO_BATCHES: Final = "No batches: the dims below are all there are."


def written(config: ModelConfig, origin: str, reasons: Mapping[str, str] | None = None) -> str:
    """Return the text of a config.pbtxt; ``origin`` says where the model came from, ``reasons`` why a field is so."""
    parts = [
        f"# {origin}\n"
        "# Each line may be changed. What is left out is filled in when the model is loaded;\n"
        "# `nerite check` says whether all is right.\n"
    ]
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        text = to_text(dataclasses.replace(ModelConfig(), **{field.name: value}))
        if field.name == "max_batch_size" and not value and config.input:
            text = "max_batch_size: 0\n"
            parts.append(f"# {_NO_BATCHES}\n{text}")
        elif text:
            said = (_EXPLAINED.get(field.name), (reasons or {}).get(field.name))
            parts.append("".join(f"# {line}\n" for line in said if line) + text)
    return "\n".join(parts)
