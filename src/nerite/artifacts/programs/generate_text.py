"""Continues a text with a model of Hugging Face's transformers, which is in the folder ``weights`` beside this file.

The request's parameter ``max_new_tokens`` says how far.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import triton_python_backend_utils as pb_utils

MAX_NEW_TOKENS = 64


class TritonPythonModel:
    """Takes ``text``, and gives ``generated``: what comes after it, or what it is turned into."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load tokenizer and model."""
        weights = Path(__file__).with_name("weights")
        trusted = "TRUST_REMOTE_CODE" in json.loads(args["model_config"])["parameters"]
        self.device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        self.turns = json.loads((weights / "config.json").read_text()).get("is_encoder_decoder", False)
        kind: Any = AutoModelForSeq2SeqLM if self.turns else AutoModelForCausalLM
        self.tokenizer: Any = AutoTokenizer.from_pretrained(weights, trust_remote_code=trusted)
        model: Any = kind.from_pretrained(weights, trust_remote_code=trusted)
        self.model = model.eval().to(self.device)
        self.longest = getattr(model.config, "max_position_embeddings", None) or sys.maxsize

    def execute(self, requests: list[Any]) -> list[Any]:
        """Generate for each request in turn."""
        return [self.respond(request) for request in requests]

    def respond(self, request: Any) -> Any:
        """Return what the model generates."""
        tensor: Any = pb_utils.get_input_tensor_by_name(request, "text")
        text = tensor.as_numpy()[0].decode()
        limit = int(json.loads(request.parameters() or "{}").get("max_new_tokens", MAX_NEW_TOKENS))
        encoded = self.tokenizer(text, return_tensors="pt").to(self.device)
        length = 0 if self.turns else encoded["input_ids"].shape[1]
        limit = max(1, min(limit, self.longest - length))
        padding = self.tokenizer.pad_token_id
        with torch.inference_mode():
            tokens = self.model.generate(
                **encoded,
                max_new_tokens=limit,
                pad_token_id=self.tokenizer.eos_token_id if padding is None else padding,
            )
        made = tokens[0] if self.turns else tokens[0, length:]
        generated = self.tokenizer.decode(made, skip_special_tokens=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor("generated", np.array([generated.encode()], object))])
