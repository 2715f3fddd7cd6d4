"""Tokenizes texts, and pads each request to one of a few lengths.

Why a few? Only requests of one shape can be run as one batch. With no padding hardly two requests would ever meet, and
with all padded to the longest that BERT can read, most of its work would be padding. Steps of 16 are in between.

The other way is ``allow_ragged_batch``: the texts of a batch reach the model as one long row, without any padding,
beside an input that says where each ends. It is better still, for a model that was made to read such rows. A BERT as it
comes out of ``transformers`` was not.
"""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import triton_python_backend_utils as pb_utils

STEP = 16


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[:, 0] for request in requests]
        encodings = iter(self.tokenizer.encode_batch([text.decode() for row in texts for text in row]))
        return [self.response([next(encodings) for _ in row]) for row in texts]

    def response(self, encodings):
        """Return the rows of one request, all of the same length."""
        length = -(-max(map(len, encodings)) // STEP) * STEP
        for encoding in encodings:
            encoding.pad(length)
        ids = np.array([encoding.ids for encoding in encodings], np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)])
