"""Answers questions about Nerite with the passage of the documentation that fits best, piece by piece."""

import json
import re
from pathlib import Path

import numpy as np
from passages import Finder, Passage

import triton_python_backend_utils as pb_utils

NOTHING = "The documentation does not say."
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        file = Path(__file__).with_name("passages.json")
        self.finder = Finder([Passage(*each) for each in json.loads(file.read_text())])

    def execute(self, requests):
        for request in requests:
            question = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode(errors="replace")
            sender = request.get_response_sender()
            for piece in re.findall(r"\s*\S+\s*", self.answer(question)):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([piece], object))]))
            sender.send(flags=FINAL)

    def answer(self, question):
        """Return a passage, with the page that it is on."""
        found = self.finder.best(question)
        return NOTHING if found is None else f"{found.text}\n\n(docs/{found.page}, {found.heading})"
