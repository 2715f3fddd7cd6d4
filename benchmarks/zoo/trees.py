"""The forest, as XGBoost, LightGBM and scikit-learn have it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from zoo.contestant import ROWS, Call, Contestant, parameter

COUNT = 500
(FEATURES,) = ROWS["forest"]


def samples() -> tuple[Any, Any]:
    """Return what the forests learn from: rows, and the class of each."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((8000, FEATURES), np.float32)
    classes = (rows[:, :10].sum(1) + rows[:, 10] * rows[:, 11] + random.standard_normal(8000) > 0).astype(int)
    return rows, classes


def _write_xgboost(model: str, version: Path) -> None:
    import xgboost

    options = {"objective": "binary:logistic", "max_depth": 6, "eta": 0.05}
    xgboost.train(options, xgboost.DMatrix(*samples()), COUNT).save_model(version / "xgboost.ubj")


def _open_xgboost(model: str, version: Path, threads: int = 1) -> Call:
    import xgboost

    booster = xgboost.Booster({"nthread": threads}, model_file=version / "xgboost.ubj")
    return lambda rows: booster.inplace_predict(rows, validate_features=False)


def _write_lightgbm(model: str, version: Path) -> None:
    import lightgbm

    options = {"objective": "binary", "num_leaves": 63, "learning_rate": 0.05, "verbosity": -1}
    lightgbm.train(options, lightgbm.Dataset(*samples()), COUNT).save_model(version / "model.txt")


def _open_lightgbm(model: str, version: Path, threads: int = 1) -> Call:
    import lightgbm

    booster = lightgbm.Booster(model_file=version / "model.txt")
    return lambda rows: booster.predict(rows, num_threads=threads)


def _write_sklearn(model: str, version: Path) -> None:
    import treelite
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(COUNT, max_depth=8, random_state=0).fit(*samples())
    treelite.sklearn.import_model(forest).serialize(version / "checkpoint.tl")
    (version / "forest.pkl").write_bytes(pickle.dumps(forest))


def _open_sklearn(model: str, version: Path, threads: int = 1) -> Call:
    forest = pickle.loads((version / "forest.pkl").read_bytes())
    forest.n_jobs = threads
    return forest.predict_proba  # type: ignore[no-any-return]  # without types


OPENED = {"xgboost": _open_xgboost, "lightgbm": _open_lightgbm, "sklearn": _open_sklearn}
"""Opens a forest, to compute with so many threads."""
_WRITE = {"xgboost": _write_xgboost, "lightgbm": _write_lightgbm, "sklearn": _write_sklearn}
_BATCHES = {"forest": (1, 32, 256)}
_CONFIG = 'backend: "fil"\n' + parameter("cpu_nthread", "1")
TREES = tuple(
    Contestant(name, _BATCHES, write, OPENED[name], lambda model: _CONFIG, "input__0", "output__0")
    for name, write in _WRITE.items()
)
