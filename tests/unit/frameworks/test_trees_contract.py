"""Forests pass the tests that every backend has to pass, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from tree_instances import save

from nerite.frameworks.trees import TreesBackend
from nerite.testing import Answer, BackendContract
from tree_models import ROWS, Forest, lightgbm, sklearn, xgboost


class Trees(BackendContract):
    backend = TreesBackend()
    forest: Callable[[], Forest]

    def write_model(self, directory: Path) -> None:
        save(type(self).forest(), directory)

    def break_model(self, directory: Path) -> None:
        path = directory / "1" / type(self).forest().filename
        path.write_bytes(path.read_bytes()[:-9000])

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"input__0": ROWS[:1]}, {"input__0": ROWS[1:2]}, {"input__0": ROWS[2:5]}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        rows = inputs["input__0"]
        return {"output__0": np.reshape(type(self).forest().predict(rows), (len(rows), -1))}


class TestXgboost(Trees):
    forest = staticmethod(cache(lambda: xgboost("multi:softprob", "three")))


class TestLightgbm(Trees):
    forest = staticmethod(cache(lambda: lightgbm("binary", "two")))

    def break_model(self, directory: Path) -> None:
        (directory / "1" / "model.txt").write_text("no model")


class TestSklearn(Trees):
    forest = staticmethod(cache(lambda: sklearn("RandomForestRegressor")))
