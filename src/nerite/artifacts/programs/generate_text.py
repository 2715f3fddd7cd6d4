"""Continues a text with a model of Hugging Face's transformers, which is in the folder ``weights`` beside this file.

The request's parameter ``max_new_tokens`` says how far.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import triton_python_backend_utils as pb_utils

from .pretrained import WEIGHTS, Pretrained

MAX_NEW_TOKENS = 64


class TritonPythonModel(Pretrained):
    """Takes ``text``, and gives ``generated``: what comes after it, or what it is turned into."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load tokenizer and model."""
        self.turns = json.loads((WEIGHTS / "config.json").read_text()).get("is_encoder_decoder", False)
        self.load(AutoModelForSeq2SeqLM if self.turns else AutoModelForCausalLM, args)
        self.longest = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize

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
