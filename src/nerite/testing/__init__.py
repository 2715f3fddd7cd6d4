"""Runs Python models in tests without a server; ``BackendContract`` has the tests that every backend must pass.

    from nerite.testing import load_model

    def test_doubles():
        with load_model("models/doubler") as model:
            answer = model.infer({"INPUT0": np.ones((1, 4), np.float32)})
        assert answer["OUTPUT0"].tolist() == [[2, 2, 2, 2]]

The model runs in the test's process, through the same code as in the server: its configuration is read and completed,
requests are validated against it, and the same rules apply to outputs. Exceptions of the model reach the test
unchanged, so that the test runner shows where they were raised.
"""

from nerite.testing.contract import BackendContract
from nerite.testing.model_under_test import ModelUnderTest, SequenceUnderTest, load_model
from nerite.testing.requests import Answer, Request

__all__ = ["load_model", "ModelUnderTest", "SequenceUnderTest", "Request", "Answer", "BackendContract"]
