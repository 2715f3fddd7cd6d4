"""Generates text with a Hugging Face transformers model from the directory ``weights`` beside this file.

The request parameter ``max_new_tokens`` limits the number of generated tokens.
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
    """Takes ``text``, and returns ``generated``: its continuation, or its transformation by an encoder-decoder."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the tokenizer and the model."""
        self.encoder_decoder = json.loads((WEIGHTS / "config.json").read_text()).get("is_encoder_decoder", False)
        self.load(AutoModelForSeq2SeqLM if self.encoder_decoder else AutoModelForCausalLM, args)
        self.max_length = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize

    def execute(self, requests: list[Any]) -> list[Any]:
        """Generate text for each request in turn."""
        return [self.respond(request) for request in requests]

    def respond(self, request: Any) -> Any:
        """Return the response to one request."""
        tensor: Any = pb_utils.get_input_tensor_by_name(request, "text")
        text = tensor.as_numpy()[0].decode()
        limit = int(json.loads(request.parameters() or "{}").get("max_new_tokens", MAX_NEW_TOKENS))
        encoded = self.tokenizer(text, return_tensors="pt").to(self.device)
        length = 0 if self.encoder_decoder else encoded["input_ids"].shape[1]
        limit = max(1, min(limit, self.max_length - length))
        padding = self.tokenizer.pad_token_id
        with torch.inference_mode():
            tokens = self.model.generate(
                **encoded,
                max_new_tokens=limit,
                pad_token_id=self.tokenizer.eos_token_id if padding is None else padding,
            )
        new_tokens = tokens[0] if self.encoder_decoder else tokens[0, length:]
        generated = self.tokenizer.decode(new_tokens, skip_special_tokens=True)
        return pb_utils.InferenceResponse([pb_utils.Tensor("generated", np.array([generated.encode()], object))])
