"""Tokenizes questions: a word, a number."""

import re
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

LENGTH = 12
UNKNOWN = 1


class TritonPythonModel:
    def initialize(self, args):
        self.vocabulary = vocabulary()

    def execute(self, requests):
        responses = []
        for request in requests:
            questions = pb_utils.get_input_tensor_by_name(request, "question").as_numpy()
            words = np.array([numbers(question.decode(), self.vocabulary) for (question,) in questions], np.int64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("words", words)]))
        return responses


def vocabulary():
    """Return the number of each word that the model knows: its line in ``vocabulary.txt``."""
    lines = Path(__file__).with_name("vocabulary.txt").read_text().split()
    return {word: number for number, word in enumerate(lines)}


def numbers(question, vocabulary):
    """Return the numbers of the words of a question, with zeros after them."""
    found = [vocabulary.get(word, UNKNOWN) for word in re.findall(r"\w+", question.lower())]
    return (found + [0] * LENGTH)[:LENGTH]
