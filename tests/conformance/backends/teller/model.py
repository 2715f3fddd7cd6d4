"""A backend of which a model is a file with a word: tells it, and what it was started with."""

import json
import os
import sys

import numpy as np
from teller_words import read_word

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        seen = {**config.as_dict(), "directory": pb_utils.get_model_dir()}
        if not seen["input"]:
            config.add_input({"name": "ASKED", "data_type": "TYPE_STRING", "dims": [1]})
            config.add_output({"name": "TOLD", "data_type": "TYPE_STRING", "dims": [1]})
            config.set_max_batch_size(4)
        return config

    def initialize(self, args):
        directory = pb_utils.get_model_dir()
        self.known = {
            **args,
            "word": read_word(directory),
            "directory": directory,
            "module": __name__,
            "file": os.path.basename(__file__),
            "on the path": json.dumps([args["model_repository"] in sys.path, directory in sys.path]),
            "the backend's on the path": json.dumps(os.path.dirname(__file__) in sys.path),
        }

    def execute(self, requests):
        responses = []
        for request in requests:
            (asked,) = pb_utils.get_input_tensor_by_name(request, "ASKED").as_numpy().flat
            if asked == b"raise":
                raise ValueError("told to")
            told = np.array([[self.known.get(asked.decode(), "")]], object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", told)]))
        return responses
