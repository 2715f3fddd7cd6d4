"""Estimators become ONNX models that say what they answer; what cannot is told in a line."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from sklearn.base import BaseEstimator
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from nerite.artifacts.convert_scikit_learn import main

ROWS = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)


class Unknown(BaseEstimator):  # type: ignore[misc]  # without types
    """What no converter knows."""

    n_features_in_ = 4

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Unknown, ()


def converted(folder: Path, model: Any) -> Path:
    (folder / "model.pkl").write_bytes(pickle.dumps(model))
    assert main(str(folder / "model.pkl"), str(folder / "model.onnx")) == 0
    return folder / "model.onnx"


@pytest.mark.parametrize("targets", [1, 2, 3])
@pytest.mark.parametrize(
    "estimator", [LinearRegression(), make_pipeline(StandardScaler(), ExtraTreesRegressor(3, random_state=0))]
)
def test_as_many_values_as_there_are_targets(tmp_path: Path, estimator: Any, targets: int) -> None:
    model = estimator.fit(ROWS, ROWS[:, :targets] if targets > 1 else ROWS[:, 0])
    session = onnxruntime.InferenceSession(converted(tmp_path, model))
    (output,) = session.get_outputs()
    assert output.shape[1:] == [targets]
    (answer,) = session.run(None, {"features": ROWS})
    np.testing.assert_allclose(answer, model.predict(ROWS).reshape(-1, targets), atol=1e-4)


def test_a_file_that_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = pickle.dumps(LinearRegression().fit(ROWS, ROWS[:, 0]))
    (tmp_path / "model.pkl").write_bytes(content[:-20])
    assert main(str(tmp_path / "model.pkl"), str(tmp_path / "model.onnx")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, says in ((LinearRegression(), "it was not fitted"), (Unknown(), "Unable to find a shape calculator")):
        (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
        assert main(str(tmp_path / "model.pkl"), str(tmp_path / "model.onnx")) == 1
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
