"""Classifies texts with a model of Hugging Face's transformers, which is in the folder ``weights`` beside this file."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from .pretrained import Batched


class TritonPythonModel(Batched):
    """Takes ``text``, and gives ``scores``: a probability for each class, or what a regression predicts."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load tokenizer and model."""
        self.load(AutoModelForSequenceClassification, args)

    def compute(self, encoded: Any) -> tuple[str, torch.Tensor]:
        """Classify texts."""
        logits = self.model(**encoded).logits.float()
        if self.model.config.problem_type == "regression" or logits.shape[1] == 1:
            return "scores", logits
        if self.model.config.problem_type == "multi_label_classification":
            return "scores", logits.sigmoid()
        return "scores", logits.softmax(1)
