"""Embeds texts with a model of Hugging Face's transformers, which is in the folder ``weights`` beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Takes ``text``, and gives ``embedding``: the mean of its tokens, unless 1_Pooling says that the first counts."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load tokenizer and model."""
        weights = Path(__file__).with_name("weights")
        trusted = "TRUST_REMOTE_CODE" in json.loads(args["model_config"])["parameters"]
        self.device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(weights, trust_remote_code=trusted)
        model: Any = AutoModel.from_pretrained(weights, trust_remote_code=trusted)
        self.model = model.eval().to(self.device)
        # As sentence-transformers writes them.
        pooling = weights / "1_Pooling" / "config.json"
        modules = weights / "modules.json"
        self.first_token = pooling.is_file() and json.loads(pooling.read_text()).get("pooling_mode_cls_token", False)
        self.normalised = modules.is_file() and "Normalize" in modules.read_text()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Embed the texts of all requests as one batch."""
        tensors: Any = [pb_utils.get_input_tensor_by_name(request, "text") for request in requests]
        rows = [tensor.as_numpy()[:, 0] for tensor in tensors]
        texts = [text.decode() for row in rows for text in row]
        encoded = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            tokens = self.model(**encoded).last_hidden_state.float()
            embedded = tokens[:, 0] if self.first_token else self.mean(tokens, encoded["attention_mask"])
            if self.normalised:
                embedded = torch.nn.functional.normalize(embedded)
        parts = np.split(embedded.cpu().numpy(), np.cumsum([len(row) for row in rows])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("embedding", part)]) for part in parts]

    def mean(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the mean of each text's tokens, without the padding."""
        counted = mask.unsqueeze(2).to(tokens.dtype)
        return (tokens * counted).sum(1) / counted.sum(1).clamp(min=1)
