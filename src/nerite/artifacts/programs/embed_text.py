"""Embeds texts with a Hugging Face transformers model from the directory ``weights`` beside this file."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoModel

from .pretrained import WEIGHTS, Batched


class TritonPythonModel(Batched):
    """Takes ``text``, and returns ``embedding``: the mean of its tokens, or the first if 1_Pooling says so."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the tokenizer and the model."""
        self.load(AutoModel, args)
        # Files written by sentence-transformers.
        pooling = WEIGHTS / "1_Pooling" / "config.json"
        modules = WEIGHTS / "modules.json"
        self.first_token = pooling.is_file() and json.loads(pooling.read_text()).get("pooling_mode_cls_token", False)
        self.normalised = modules.is_file() and "Normalize" in modules.read_text()

    def compute(self, encoded: Any) -> tuple[str, torch.Tensor]:
        """Embed texts."""
        tokens = self.model(**encoded).last_hidden_state.float()
        embedded = tokens[:, 0] if self.first_token else self.mean(tokens, encoded["attention_mask"])
        return "embedding", torch.nn.functional.normalize(embedded) if self.normalised else embedded

    def mean(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the mean of each text's tokens, excluding padding."""
        counted = mask.unsqueeze(2).to(tokens.dtype)
        return (tokens * counted).sum(1) / counted.sum(1).clamp(min=1)
