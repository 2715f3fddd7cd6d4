"""Forests answer what the libraries that made them predict: in every shape, type and engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tree_instances import Opened, as_rows, context, output, parameters, save

from nerite.backends.interface import ExecutionTimes, InstanceContext
from nerite.backends.machine import core_share
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument
from nerite.frameworks.trees import TreesBackend
from opened import bare, decoded, header, request
from tree_models import FEATURES, ROWS, TRAINING, Forest, legacy_binary, lightgbm, sklearn, xgboost

MAKERS: dict[str, Callable[..., Forest]] = {
    "xgboost-value": lambda: xgboost("reg:squarederror", "value"),
    "xgboost-count": lambda: xgboost("count:poisson", "two"),
    "xgboost-two": lambda: xgboost("binary:logistic", "two"),
    "xgboost-three": lambda **more: xgboost("multi:softprob", "three", **more),
    "xgboost-pair": lambda: xgboost("reg:squarederror", "pair"),
    "xgboost-vector-leaves": lambda: xgboost("reg:squarederror", "pair", multi_strategy="multi_output_tree"),
    "xgboost-dart": lambda: xgboost("reg:squarederror", "value", booster="dart", rate_drop=0.5),
    "xgboost-parallel": lambda: xgboost("multi:softprob", "three", num_parallel_tree=2),
    "lightgbm-value": lambda: lightgbm("regression", "value"),
    "lightgbm-two": lambda: lightgbm("binary", "two"),
    "lightgbm-three": lambda **more: lightgbm("multiclass", "three", **more),
    "lightgbm-three-apart": lambda: lightgbm("multiclassova", "three"),
    "lightgbm-forest": lambda: lightgbm("regression", "value", boosting="rf", bagging_freq=1, bagging_fraction=0.5),
    "lightgbm-root": lambda: lightgbm("regression", "value", reg_sqrt=True),
    "lightgbm-intensity": lambda: lightgbm("cross_entropy_lambda", "two"),
    "xgboost-hinge": lambda: xgboost("binary:hinge", "two"),
    "sklearn-value": lambda: sklearn("RandomForestRegressor"),
    "sklearn-pair": lambda: sklearn("RandomForestRegressor", "pair"),
    "sklearn-two": lambda: sklearn("RandomForestClassifier", "two"),
    "sklearn-three": lambda **more: sklearn("ExtraTreesClassifier", "three", **more),
    "sklearn-boosted-value": lambda: sklearn("GradientBoostingRegressor"),
    "sklearn-boosted-three": lambda: sklearn("GradientBoostingClassifier", "three"),
    "sklearn-histograms": lambda: sklearn("HistGradientBoostingClassifier", "three"),
    "sklearn-isolation": lambda: sklearn("IsolationForest"),
}
NO_GAPS = ROWS[5:]
"""scikit-learn's gradient boosting refuses rows with gaps."""


@pytest.mark.parametrize("engine", ["auto", "treelite", "onnxruntime"])
@pytest.mark.parametrize("name", MAKERS)
def test_predictions_are_those_of_the_library(tmp_path: Path, name: str, engine: str) -> None:
    forest = MAKERS[name]()
    rows = NO_GAPS if name.startswith("sklearn") else ROWS
    opened = Opened(tmp_path, forest, parameters(engine=engine))
    expected = as_rows(forest.predict(rows))
    assert opened.config["output"] == [output(expected.shape[1])]
    exact = engine == "auto" and name.startswith("xgboost")
    np.testing.assert_allclose(opened.prediction(rows), expected, rtol=0 if exact else 2e-6, atol=0 if exact else 1e-6)
    first, second, third = opened.joined(rows[:1], rows[1:20], rows[20:])
    np.testing.assert_array_equal(np.concatenate([first, second, third]), opened.prediction(rows))


@pytest.mark.parametrize("suffix", ["json", "ubj"])
def test_both_formats_of_xgboost(tmp_path: Path, suffix: str) -> None:
    forest = xgboost("binary:logistic", "two")._replace(filename=f"xgboost.{suffix}")
    opened = Opened(tmp_path, forest, parameters(model_type=f"xgboost_{suffix}"))
    np.testing.assert_array_equal(opened.prediction(), as_rows(forest.predict(ROWS)))


def test_the_old_format_of_xgboost(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "xgboost.model").write_bytes(legacy_binary())
    opened = Opened(tmp_path, None, parameters(model_type="xgboost"))
    rows = np.zeros((3, FEATURES), np.float32)
    rows[:, 2] = [0.4, 0.6, np.nan]
    assert opened.prediction(rows).tolist() == [[1.5], [-2.5], [1.5]]


def test_what_a_file_holds_counts_more_than_its_name(tmp_path: Path) -> None:
    """Since 2.1, XGBoost writes UBJSON into files that it has no other idea about."""
    forest = xgboost("reg:squarederror", "value")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "xgboost.model").write_bytes(bytes(forest.model.save_raw("ubj")))
    opened = Opened(tmp_path, None, parameters(model_type="xgboost"))
    np.testing.assert_array_equal(opened.prediction(), as_rows(forest.predict(ROWS)))


@pytest.mark.parametrize("engine", ["auto", "treelite"])
def test_features_with_categories(tmp_path: Path, engine: str) -> None:
    rows = TRAINING.copy()
    rows[:, 0] = np.arange(len(rows)) % 7
    forest = lightgbm("regression", "value", rows, categories=[0])
    opened = Opened(tmp_path, forest, parameters(engine=engine))
    np.testing.assert_allclose(opened.prediction(rows[:100]), as_rows(forest.predict(rows[:100])), rtol=1e-6)
    with pytest.raises(InvalidArgument, match="with onnxruntime: features with categories are not for ONNX Runtime"):
        Opened(tmp_path, None, parameters(engine="onnxruntime"))


@pytest.mark.parametrize("engine", ["auto", "treelite", "onnxruntime"])
@pytest.mark.parametrize("maker", ["xgboost-three", "lightgbm-three", "sklearn-three"])
def test_an_answer_does_not_depend_on_the_batch(tmp_path: Path, maker: str, engine: str) -> None:
    opened = Opened(tmp_path, MAKERS[maker](trees=100), parameters(engine=engine, cpu_nthread="2"))
    alone = np.concatenate([opened.prediction(row[None]) for row in NO_GAPS])
    np.testing.assert_array_equal(opened.prediction(np.tile(NO_GAPS, (5, 1)))[: len(NO_GAPS)], alone)


# ---- Classes and probabilities ----


def test_the_class_of_three(tmp_path: Path) -> None:
    forest = xgboost("multi:softmax", "three")
    opened = Opened(tmp_path, forest, parameters(is_classifier="true"))
    assert opened.config["output"] == [output(1)]
    np.testing.assert_array_equal(opened.prediction(), as_rows(forest.predict(ROWS)))


@pytest.mark.parametrize("engine", ["auto", "treelite", "onnxruntime"])
def test_a_model_that_gives_classes_alone_gives_probabilities_too(tmp_path: Path, engine: str) -> None:
    forest = xgboost("multi:softmax", "three")
    wanted = {"is_classifier": "true", "predict_proba": "true", "engine": engine}
    answer = Opened(tmp_path, forest, parameters(**wanted)).prediction()
    expected = MAKERS["xgboost-three"]().predict(ROWS)
    np.testing.assert_allclose(answer, expected, rtol=1e-6)


@pytest.mark.parametrize("key", ["is_classifier", "output_class"])
def test_the_class_of_two(tmp_path: Path, key: str) -> None:
    forest = lightgbm("binary", "two")
    answer = Opened(tmp_path, forest, parameters(**{key: "true"})).prediction()
    np.testing.assert_array_equal(answer, as_rows(forest.predict(ROWS) > 0.5))


def test_a_threshold(tmp_path: Path) -> None:
    forest = xgboost("binary:logistic", "two")
    answer = Opened(tmp_path, forest, parameters(is_classifier="true", threshold="0.8")).prediction()
    expected = as_rows(forest.predict(ROWS) > 0.8)
    assert 0 < expected.sum() < (forest.predict(ROWS) > 0.5).sum()
    np.testing.assert_array_equal(answer, expected)


def test_both_probabilities_of_two_classes(tmp_path: Path) -> None:
    forest = xgboost("binary:logistic", "two")
    config = parameters(is_classifier="true", predict_proba="true") | {"output": [output(2)]}
    second = forest.predict(ROWS)
    np.testing.assert_array_equal(Opened(tmp_path, forest, config).prediction(), np.stack([1 - second, second], 1))


# ---- Types and shapes ----


@pytest.mark.parametrize("engine", ["auto", "treelite", "onnxruntime"])
@pytest.mark.parametrize("maker", ["xgboost-three", "lightgbm-three"])
@pytest.mark.parametrize("dtype", ["f8", "i4", "u1", "f2", "?"])
def test_rows_of_other_types(tmp_path: Path, maker: str, dtype: str, engine: str) -> None:
    kind = dtypes.from_numpy(np.dtype(dtype))
    assert kind is not None
    taken = {"name": "input__0", "data_type": kind.config_name, "dims": [FEATURES]}
    forest = MAKERS[maker]()
    rows = (np.nan_to_num(ROWS) * 3).clip(0, 9).astype(dtype)
    opened = Opened(tmp_path, forest, parameters(engine=engine) | {"input": [taken], "output": [output(3)]})
    np.testing.assert_allclose(opened.prediction(rows), forest.predict(rows.astype("f4")), rtol=2e-6)


def test_doubles_are_exact(tmp_path: Path) -> None:
    forest = lightgbm("regression", "value")
    taken = {"name": "input__0", "data_type": "TYPE_FP64", "dims": [FEATURES]}
    opened = Opened(tmp_path, forest, {"input": [taken], "output": [output(1, kind="TYPE_FP64")]})
    rows = ROWS.astype("f8") + 1e-9
    np.testing.assert_array_equal(opened.prediction(rows), as_rows(forest.predict(rows)))


def test_classes_are_whole_numbers_where_they_are_wanted_so(tmp_path: Path) -> None:
    config = parameters(is_classifier="true") | {"output": [output(1, kind="TYPE_INT64")]}
    answer = Opened(tmp_path, lightgbm("multiclass", "three"), config).prediction()
    assert answer.dtype == np.int64
    assert set(answer.ravel().tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("dims", "shape"), [([3], (70, 3)), ([-1], (70, 3)), ([1, 3], (70, 1, 3)), ([-1, 1], (70, 3, 1))]
)
def test_dims_that_hold_the_same(tmp_path: Path, dims: list[int], shape: tuple[int, ...]) -> None:
    forest = MAKERS["xgboost-three"]()
    answer = Opened(tmp_path, forest, {"output": [output(*dims)]}).prediction()
    np.testing.assert_array_equal(answer, forest.predict(ROWS).reshape(shape))


@pytest.mark.parametrize(("dims", "shape"), [([-1, 3], (70, 3)), ([-1, -1], (70, 3)), ([70, 3], (70, 3))])
def test_a_model_without_batches(tmp_path: Path, dims: list[int], shape: tuple[int, ...]) -> None:
    forest = MAKERS["xgboost-three"]()
    taken = {"name": "input__0", "data_type": "TYPE_FP32", "dims": [-1, FEATURES]}
    opened = Opened(tmp_path, forest, {"max_batch_size": 0, "input": [taken], "output": [output(*dims)]})
    np.testing.assert_array_equal(opened.prediction(), forest.predict(ROWS).reshape(shape))
    assert [len(part) for part in opened.joined(ROWS, ROWS)] == [70, 70]


def test_a_model_for_one_row(tmp_path: Path) -> None:
    forest = MAKERS["xgboost-three"]()
    taken = {"name": "input__0", "data_type": "TYPE_FP32", "dims": [FEATURES]}
    opened = Opened(tmp_path, forest, {"max_batch_size": 0, "input": [taken], "output": [output(3)]})
    np.testing.assert_array_equal(opened.prediction(ROWS[0]), forest.predict(ROWS[:1])[0])


def test_rows_that_do_not_fit_a_shape_without_batches(tmp_path: Path) -> None:
    taken = {"name": "input__0", "data_type": "TYPE_FP32", "dims": [-1, -1]}
    config = {"max_batch_size": 0, "input": [taken], "output": [output(1, 3)]}
    opened = Opened(tmp_path, MAKERS["xgboost-three"](), config)
    with pytest.raises(InvalidArgument, match=r"output 'output__0' has dims .1, 3., which do not hold the 6 numbers"):
        opened.prediction(ROWS[:2])
    with pytest.raises(InvalidArgument, match="its last dimension has to be the number of features, 5"):
        opened.prediction(ROWS[:1, :4])
    assert opened.prediction(ROWS[:1]).shape == (1, 3)


def test_rows_that_lie_badly_in_memory(tmp_path: Path) -> None:
    forest = MAKERS["xgboost-two"]()
    opened = Opened(tmp_path, forest)
    raw = memoryview(b"?" + ROWS.tobytes())[1:]
    crooked = bare(header([("input__0", dtypes.FP32, ROWS.shape)]), [raw])
    np.testing.assert_array_equal(opened.answers(crooked)[0]["output__0"], as_rows(forest.predict(ROWS)))


# ---- Explanations ----


def explained(*dims: int) -> dict[str, Any]:
    return {"output": [output(-1), output(*dims, name="treeshap_output")]}


def test_explanations_of_xgboost(tmp_path: Path) -> None:
    import xgboost as library

    forest = MAKERS["xgboost-three"]()
    opened = Opened(tmp_path, forest, explained(3, FEATURES + 1))
    both = opened.answers(request(input__0=ROWS))[0]
    np.testing.assert_array_equal(both["output__0"], forest.predict(ROWS))
    expected = forest.model.predict(library.DMatrix(ROWS), pred_contribs=True)
    np.testing.assert_allclose(both["treeshap_output"], expected, atol=1e-6)
    one, other = opened.answers(request(["treeshap_output"], input__0=ROWS[:2]), request(input__0=ROWS[2:]))
    assert list(one) == ["treeshap_output"]
    np.testing.assert_allclose(np.concatenate([one["treeshap_output"], other["treeshap_output"]]), expected, atol=1e-6)


def test_explanations_of_lightgbm(tmp_path: Path) -> None:
    forest = MAKERS["lightgbm-two"]()
    answer = Opened(tmp_path, forest, explained(FEATURES + 1)).answers(request(input__0=ROWS))[0]
    np.testing.assert_allclose(answer["treeshap_output"], forest.model.predict(ROWS, pred_contrib=True), rtol=1e-6)


# ---- Instances ----


def test_single_rows_for_several_threads_at_once(tmp_path: Path) -> None:
    """LightGBM computes one row in memory of its own, which no other call may write into meanwhile."""
    opened = Opened(tmp_path, lightgbm("binary", "two"))
    engine = opened.instance.compute.engine  # type: ignore[attr-defined]
    assert engine.name == "lightgbm"
    expected = engine.predict(ROWS)

    def ask(first: int) -> None:
        for step in range(10 * len(ROWS)):
            number = (first + step) % len(ROWS)
            for dtype in (np.float64, np.float32):
                row = np.ascontiguousarray(ROWS[number : number + 1], dtype)
                np.testing.assert_allclose(engine.predict(row), expected[number : number + 1], rtol=1e-6)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))


def test_instances_share_an_engine(tmp_path: Path) -> None:
    forest = MAKERS["xgboost-two"]()
    opened = Opened(tmp_path, forest)
    others = [opened.model.instance(InstanceContext(f"m_{index}")) for index in range(1, 3)]
    assert len(opened.model.engines) == 1
    assert len({id(instance.compute.engine) for instance in (opened.instance, *others)}) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("wanted", ["0", "-1", "3"])
def test_threads_are_those_of_the_parameter_or_the_share_of_the_cores(tmp_path: Path, wanted: str) -> None:
    save(MAKERS["xgboost-two"](), tmp_path)
    backend = TreesBackend()
    config = backend.complete(context(tmp_path, parameters(cpu_nthread=wanted)))
    for sharing in (1, 2):
        place = InstanceContext("m_0", sharing=sharing)
        model = backend.open(context(tmp_path, config))
        [response] = model.instance(place).execute([request(input__0=ROWS)], ExecutionTimes())
        assert list(model.engines) == [("CPU", 3 if wanted == "3" else core_share(place))]
        assert decoded(response)["output__0"].shape == (70, 1)
