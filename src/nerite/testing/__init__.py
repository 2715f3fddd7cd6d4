"""Run a Python model in a test, without a server; and what every backend has to do (``BackendContract``).

    from nerite.testing import load_model

    def test_doubles():
        with load_model("models/doubler") as model:
            answer = model.infer({"INPUT0": np.ones((1, 4), np.float32)})
        assert answer["OUTPUT0"].tolist() == [[2, 2, 2, 2]]

The model runs in the test's own process, through the same code as in the server: its configuration is read and
completed, requests are checked against it, outputs are passed on by the same rules. What the model raises arrives as
the model raised it, so that the test runner shows the place.
"""

from nerite.testing.contract import BackendContract
from nerite.testing.model_under_test import ModelUnderTest, SequenceUnderTest, load_model
from nerite.testing.requests import Answer, Request

__all__ = ["load_model", "ModelUnderTest", "SequenceUnderTest", "Request", "Answer", "BackendContract"]
