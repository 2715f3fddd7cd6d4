"""Loads a Hugging Face transformers model and its tokenizer from the directory ``weights`` beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

import triton_python_backend_utils as pb_utils

WEIGHTS = Path(__file__).with_name("weights")


class Pretrained:
    """A model with its tokenizer."""

    def load(self, kind: Any, args: dict[str, Any]) -> None:
        """Load the tokenizer, and the model as class ``kind``, onto the device of the instance."""
        trusted = "TRUST_REMOTE_CODE" in json.loads(args["model_config"])["parameters"]
        self.device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(WEIGHTS, trust_remote_code=trusted)
        model: Any = kind.from_pretrained(WEIGHTS, trust_remote_code=trusted)
        self.model = model.eval().to(self.device)


class Batched(Pretrained):
    """A model that processes the texts of all requests as one batch."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Respond to each request with the rows of its texts."""
        tensors: Any = [pb_utils.get_input_tensor_by_name(request, "text") for request in requests]
        rows = [tensor.as_numpy()[:, 0] for tensor in tensors]
        texts = [text.decode() for row in rows for text in row]
        encoded = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            name, computed = self.compute(encoded)
        parts = np.split(computed.cpu().numpy(), np.cumsum([len(row) for row in rows])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor(name, part)]) for part in parts]

    def compute(self, encoded: Any) -> tuple[str, torch.Tensor]:
        """Return the name of the output, and one row for each of the ``encoded`` texts."""
        raise NotImplementedError
