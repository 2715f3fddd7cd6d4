"""Small forests of every kind, trained on the spot, and what their own libraries predict with them.

The libraries are imported by the functions that need them: they take seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FEATURES = 5
Rows = NDArray[np.float32]
_random = np.random.default_rng(7)
TRAINING: Rows = _random.standard_normal((400, FEATURES)).astype(np.float32)
_VALUES = TRAINING[:, 0] * 2 + TRAINING[:, 1] * TRAINING[:, 2]
TARGETS: dict[str, NDArray[Any]] = {
    "value": _VALUES,
    "two": (_VALUES > 0).astype(int),
    "three": np.digitize(_VALUES, [-1, 1]),
    "pair": np.stack([_VALUES, -_VALUES], 1),
}
ROWS: Rows = _random.standard_normal((70, FEATURES)).astype(np.float32)
ROWS[3, 1] = ROWS[4, 0] = np.nan


class Forest(NamedTuple):
    """A trained model: how to write it, and what its own library predicts for rows."""

    filename: str
    save: Callable[[Path], object]
    predict: Callable[[Rows], NDArray[Any]]
    model: Any


def xgboost(objective: str, target: str, trees: int = 5, **options: Any) -> Forest:
    import xgboost as library

    if objective.startswith("multi:"):
        options["num_class"] = 3
    options = {"objective": objective, "max_depth": 3, "nthread": 1, **options}
    booster = library.train(options, library.DMatrix(TRAINING, TARGETS[target]), trees)

    def predict(rows: Rows) -> NDArray[Any]:
        return booster.predict(library.DMatrix(rows))

    return Forest("xgboost.ubj", lambda path: booster.save_model(path), predict, booster)


def lightgbm(
    objective: str,
    target: str,
    rows: Rows = TRAINING,
    trees: int = 5,
    categories: Sequence[int] = (),
    **options: Any,
) -> Forest:
    import lightgbm as library

    if objective.startswith("multiclass"):
        options["num_class"] = 3
    options = {"objective": objective, "num_leaves": 6, "verbosity": -1, "num_threads": 1, **options}
    booster = library.train(
        options, library.Dataset(rows, TARGETS[target], categorical_feature=list(categories)), trees
    )
    return Forest("model.txt", lambda path: booster.save_model(path), lambda rows: booster.predict(rows), booster)


def sklearn(kind: str, target: str = "value", trees: int = 4, **options: Any) -> Forest:
    import sklearn.ensemble
    import treelite

    size = {"max_iter": trees} if kind.startswith("Hist") else {"n_estimators": trees}
    model = getattr(sklearn.ensemble, kind)(random_state=1, **size, **options).fit(TRAINING, TARGETS[target])
    made = treelite.sklearn.import_model(model)
    if kind.endswith("Classifier"):
        predict = model.predict_proba
    elif kind == "IsolationForest":

        def predict(rows: Rows) -> NDArray[Any]:
            return -model.score_samples(rows)
    else:
        predict = model.predict
    return Forest("checkpoint.tl", made.serialize, predict, made)


def place(forest: Forest, repository: Path, name: str, config: str = 'backend: "fil"', filename: str = "") -> Path:
    """Put a model into a repository; return its file."""
    path = repository / name / "1" / (filename or forest.filename)
    path.parent.mkdir(parents=True)
    forest.save(path)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return path


def legacy_binary() -> bytes:
    """Return XGBoost's old format, which no current version writes: one tree, 1.5 where feature 2 is below 0.5."""
    learner = struct.pack("<fIiii29i", 0.0, FEATURES, 0, 0, 0, *[0] * 29)
    words = b"".join(struct.pack("<Q", len(word)) + word for word in (b"reg:linear", b"gbtree"))
    booster = struct.pack("<4iq2i32i", 1, 1, FEATURES, 0, 0, 1, 0, *[0] * 32)
    tree = struct.pack("<6i31i", 1, 3, 0, 1, FEATURES, 0, *[0] * 31)
    default_left = 1 << 31
    nodes = struct.pack("<iiiIf", -1, 1, 2, 2 | default_left, 0.5)
    nodes += struct.pack("<iiiIf", 0 | default_left - (1 << 32), -1, -1, 0, 1.5)
    nodes += struct.pack("<iiiIf", 0, -1, -1, 0, -2.5)
    statistics = struct.pack("<fffi", 1.0, 1.0, 0.0, 0) * 3
    return learner + words + booster + tree + nodes + statistics + struct.pack("<i", 0)
