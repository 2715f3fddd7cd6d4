"""Classifies texts with a Hugging Face transformers model from the directory ``weights`` beside this file."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from .pretrained import Batched


class TritonPythonModel(Batched):
    """Takes ``text``, and returns ``scores``: a probability per class, or the predictions of a regression."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the tokenizer and the model."""
        self.load(AutoModelForSequenceClassification, args)

    def compute(self, encoded: Any) -> tuple[str, torch.Tensor]:
        """Classify texts."""
        logits = self.model(**encoded).logits.float()
        if self.model.config.problem_type == "regression" or logits.shape[1] == 1:
            return "scores", logits
        if self.model.config.problem_type == "multi_label_classification":
            return "scores", logits.sigmoid()
        return "scores", logits.softmax(1)
