"""Text in the style of corpus.txt: the next letter depends on the last two."""

from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

LENGTH = 80
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        """Learn how often each letter follows each two others."""
        corpus = Path(__file__).with_name("corpus.txt").read_text()
        self.letters = np.array(sorted(set(corpus)))
        self.numbers = {letter: number for number, letter in enumerate(self.letters)}
        text = [self.numbers[letter] for letter in corpus]
        counts = np.full([len(self.letters)] * 3, 1e-6)
        np.add.at(counts, (text[:-2], text[1:-1], text[2:]), 1)
        self.cumulative = np.cumsum(counts / counts.sum(2, keepdims=True), 2)

    def execute(self, requests):
        """Write one letter for each request, whether it is its first or its fiftieth: they are one batch."""
        before = np.concatenate([self.state(request) for request in requests])
        chances = self.cumulative[before[:, 0], before[:, 1]]
        chosen = np.minimum((chances < np.random.random((len(requests), 1))).sum(1), len(self.letters) - 1)
        after = np.stack([before[:, 1], chosen, before[:, 2] + 1], 1).astype(np.int32)
        for request, number, state in zip(requests, chosen, after, strict=True):
            letter = pb_utils.Tensor("text", np.array([[self.letters[number]]], object))
            sender = request.get_response_sender()
            if state[2] < length(request) and not request.is_cancelled():
                # The caller gets the letter; the state stays in the server, for the next turn.
                sender.send(pb_utils.InferenceResponse([letter, pb_utils.Tensor("after", state[None])]))
                request.set_release_flags(AGAIN)
            else:
                sender.send(pb_utils.InferenceResponse([letter]), FINAL)

    def state(self, request):
        """Return what the last turn left; before the first, what the prompt says."""
        before = pb_utils.get_input_tensor_by_name(request, "before").as_numpy()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            prompt = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy()[0, 0].decode()
            known = [self.numbers[letter] for letter in ". " + prompt if letter in self.numbers]
            return np.array([[*known[-2:], 0]], np.int32)
        return before


def length(request):
    """Return how many letters the caller wants."""
    wanted = pb_utils.get_input_tensor_by_name(request, "length")
    return LENGTH if wanted is None else wanted.as_numpy()[0, 0]
