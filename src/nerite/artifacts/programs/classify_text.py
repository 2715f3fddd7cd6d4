"""Classifies texts with a model of Hugging Face's transformers, which is in the folder ``weights`` beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Takes ``text``, and gives ``scores``: a probability for each class, or what a regression predicts."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load tokenizer and model."""
        weights = Path(__file__).with_name("weights")
        trusted = "TRUST_REMOTE_CODE" in json.loads(args["model_config"])["parameters"]
        self.device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(weights, trust_remote_code=trusted)
        model: Any = AutoModelForSequenceClassification.from_pretrained(weights, trust_remote_code=trusted)
        self.model = model.eval().to(self.device)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Classify the texts of all requests as one batch."""
        tensors: Any = [pb_utils.get_input_tensor_by_name(request, "text") for request in requests]
        rows = [tensor.as_numpy()[:, 0] for tensor in tensors]
        texts = [text.decode() for row in rows for text in row]
        encoded = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            logits = self.model(**encoded).logits.float()
        scores = np.split(self.scores(logits).cpu().numpy(), np.cumsum([len(row) for row in rows])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("scores", part)]) for part in scores]

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what the logits mean."""
        if self.model.config.problem_type == "regression" or logits.shape[1] == 1:
            return logits
        if self.model.config.problem_type == "multi_label_classification":
            return logits.sigmoid()
        return logits.softmax(1)
