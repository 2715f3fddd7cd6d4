"""Answers a question from passages, by quoting the sentences that have most to do with it.

Here a language model would stand, with the question and the passages in its prompt: in and out it would look the same.
If its configuration says ``decoupled``, it sends each sentence as soon as it has it.
"""

import json
import re
from collections import Counter
from math import log

import numpy as np

import triton_python_backend_utils as pb_utils

SENTENCES = 2
NEAR = 0.7
"""How near a passage has to be to the question, compared with the nearest, to be quoted from."""


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        if not self.decoupled:
            return [response(list(answer(request))) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            for quotation in answer(request):
                sender.send(response([quotation]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None


def response(quotations):
    """Return pairs of a sentence and its source as a response."""
    sentences, cited = (np.array(column, dtype=object) for column in zip(*quotations, strict=True))
    return pb_utils.InferenceResponse([pb_utils.Tensor("sentences", sentences), pb_utils.Tensor("cited", cited)])


def answer(request):
    """Find the sentences that answer a request best; give each, in the order of the text, with its source."""
    question, passages, sources, scores = (
        pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()
        for name in ("question", "passages", "sources", "scores")
    )
    sentences = [
        (sentence, source)
        for passage, source, score in zip(passages, sources, scores, strict=True)
        if score >= NEAR * scores[0]
        for sentence in re.split(r"(?<=[.!?]) +", passage.decode())
    ]
    words = [set(stems(sentence)) for sentence, _ in sentences]
    common = Counter(word for each in words for word in each)
    asked = set(stems(question[0].decode()))
    # A word of the question that is in few of the sentences says more than one that is in all.
    weights = [sum(log(1 + len(sentences) / common[word]) for word in each & asked) for each in words]
    best = sorted(range(len(sentences)), key=lambda index: -weights[index])[:SENTENCES]
    if weights[best[0]] == 0:
        yield b"The documents do not say.", b""
        return
    for index in sorted(best):
        sentence, source = sentences[index]
        yield sentence.encode(), source


def stems(text):
    """Return the first six letters of each word: near enough for words of one family to be one."""
    return re.findall(r"([a-z0-9]{1,6})[a-z0-9]*", text.lower())
