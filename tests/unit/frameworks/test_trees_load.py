"""Loading forests: what is completed from the model, and every way in which loading is refused."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tree_instances import Opened, as_rows, output, parameters, save

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.frameworks.trees import TreesBackend, native
from nerite.frameworks.trees.engines import ENGINES, open_engine
from nerite.frameworks.trees.forest import Forest as TreeliteForest
from nerite.frameworks.trees.forest import find_forest
from tree_models import FEATURES, ROWS, TRAINING, Forest, lightgbm, sklearn, xgboost

INPUT = {"name": "input__0", "data_type": "TYPE_FP32", "dims": [FEATURES]}


@pytest.fixture(scope="module")
def two() -> Forest:
    return xgboost("binary:logistic", "two")


@pytest.fixture(scope="module")
def three() -> Forest:
    return lightgbm("multiclass", "three")


def complete(directory: Path, forest: Forest, config: dict[str, Any] | None = None, **settings: str) -> Any:
    save(forest, directory)
    return TreesBackend().complete(ModelContext("m", 1, directory, config or {}, settings))


def refusal(directory: Path, forest: Forest | None, config: dict[str, Any] | None = None, kind: str = "CPU") -> str:
    with pytest.raises(NeriteError) as refused:
        Opened(directory, forest, config, kind)
    return refused.value.message


# ---- Completion ----


def test_a_model_without_a_configuration(tmp_path: Path, three: Forest) -> None:
    assert complete(tmp_path, three, {"name": "m"}) == {
        "name": "m",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [INPUT],
        "output": [output(3)],
    }


def test_the_largest_batch_of_the_command_line(tmp_path: Path, two: Forest) -> None:
    assert complete(tmp_path, two, **{"default-max-batch-size": "8"})["max_batch_size"] == 8
    config = complete(tmp_path, two, **{"default-max-batch-size": "0"})
    assert (config["input"][0]["dims"], config["output"][0]["dims"]) == ([-1, FEATURES], [-1, 1])


def test_what_is_declared_stays(tmp_path: Path, two: Forest) -> None:
    features = {"name": "features", "data_type": "TYPE_FP64", "dims": [FEATURES]}
    config = complete(tmp_path, two, {"max_batch_size": 4, "input": [features]})
    assert config["input"] == [features]
    assert config["output"] == [output(1)]


def test_the_file_is_read_once_for_completion_and_opening(
    tmp_path: Path, two: Forest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nerite.frameworks.trees import backend

    read = []
    monkeypatch.setattr(
        backend, "Forest", lambda *args, make=backend.Forest, **more: read.append(args) or make(*args, **more)
    )
    Opened(tmp_path, two)
    assert len(read) == 1


# ---- The file ----


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as refused:
        Opened(tmp_path)
    assert refused.value.message == (
        f"unable to find '{tmp_path}/1/xgboost.ubj' for model 'm', nor any of xgboost.json, xgboost.model, model.txt, "
        "checkpoint.tl"
    )


def test_a_file_of_another_name(tmp_path: Path, two: Forest) -> None:
    save(two, tmp_path, "forest.ubj")
    assert refusal(tmp_path, None, parameters(model_type="xgboost_ubj")) == (
        f"unable to find '{tmp_path}/1/xgboost.ubj' for model 'm'. There is: forest.ubj. Rename it, or set "
        "default_model_filename"
    )
    opened = Opened(tmp_path, None, {"default_model_filename": "forest.ubj"})
    np.testing.assert_array_equal(opened.prediction(), as_rows(two.predict(ROWS)))


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    import pickle

    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pkl").write_bytes(pickle.dumps(TRAINING))
    convert = "treelite.sklearn.import_model(model).serialize('checkpoint.tl')"
    assert convert in refusal(tmp_path, None)
    message = refusal(tmp_path, None, {"default_model_filename": "model.pkl"})
    assert message.startswith(f"unable to load model 'm': '{tmp_path}/1/model.pkl' is a pickle.")
    assert convert in message


def test_a_file_of_another_format(tmp_path: Path, three: Forest) -> None:
    save(three, tmp_path, "checkpoint.tl")
    assert refusal(tmp_path, None, parameters(model_type="treelite_checkpoint")) == (
        f"unable to load model 'm': '{tmp_path}/1/checkpoint.tl' is of model_type 'lightgbm', the configuration says "
        "'treelite_checkpoint'"
    )


def test_a_file_of_no_format(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.txt").write_text("nothing of the kind")
    assert "is in no format that is recognised" in refusal(tmp_path, None)
    assert refusal(tmp_path, None, parameters(model_type="lightgbm")).startswith("unable to load model 'm'")


@pytest.mark.parametrize("part", [0.3, 0.9, 0.9999])
@pytest.mark.parametrize("suffix", ["ubj", "json", "tl"])
def test_a_file_that_lacks_its_end(tmp_path: Path, suffix: str, part: float, two: Forest) -> None:
    """treelite itself reads a checkpoint that lacks its last bytes."""
    forest = sklearn("RandomForestRegressor") if suffix == "tl" else two._replace(filename=f"xgboost.{suffix}")
    path = save(forest, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    message = refusal(tmp_path, None)
    assert message.startswith(f"unable to load model 'm': '{path}'")
    assert message.endswith("The file is cut off or damaged: copy it again")


def test_a_file_of_lightgbm_that_lacks_its_end(tmp_path: Path, three: Forest) -> None:
    """LightGBM and treelite both read it as a model of fewer trees."""
    path = save(three, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"Tree=")])
    assert refusal(tmp_path, None) == (
        f"unable to load model 'm': '{path}' is cut off: the line 'end of trees' is missing. Copy the file again"
    )


def test_what_is_not_made_of_trees(tmp_path: Path) -> None:
    linear = xgboost("reg:squarederror", "value", booster="gblinear", max_depth=None)
    assert refusal(tmp_path, linear).endswith("A model of booster 'gblinear' is not made of trees")
    leaves = lightgbm("regression", "value", linear_tree=True)._replace(filename="other.txt")
    assert "linear trees (linear_tree=True) are not supported" in refusal(
        tmp_path, leaves, {"default_model_filename": "other.txt"}
    )


def test_a_field_of_a_newer_version(tmp_path: Path, two: Forest) -> None:
    path = save(two._replace(filename="xgboost.json"), tmp_path)
    path.write_text(path.read_text().replace('"learner":{', '"learner":{"novelty":{"a":[1]},', 1))
    message = refusal(tmp_path, None)
    assert '"novelty" is not recognized' in message
    assert "set parameter 'xgboost_allow_unknown_field' to true" in message
    answer = Opened(tmp_path, None, parameters(xgboost_allow_unknown_field="true")).prediction()
    np.testing.assert_allclose(answer, as_rows(two.predict(ROWS)), rtol=1e-6)


# ---- Parameters ----


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"output_clas": "true"}, "has the parameter 'output_clas', which tree models do not have. Did you mean 'ou"),
        ({"zzz": "1"}, "which tree models do not have. There are: algo, blocks_per_sm"),
        (
            {"predict_proba": "yes"},
            "'yes' to boolean, in parameter 'predict_proba' of model 'm', which takes true or fal",
        ),
        ({"threshold": "half"}, "'half' to a number, in parameter 'threshold' of model 'm', which takes a number"),
        (
            {"cpu_nthread": "1.5"},
            "'1.5' to integral number, in parameter 'cpu_nthread' of model 'm', which takes a num",
        ),
        ({"model_type": "xgboost_jso"}, "lightgbm, treelite_checkpoint. Did you mean 'xgboost_json'?"),
        ({"is_classifier": "true", "output_class": "false"}, "contradict each other. Leave out 'output_class'"),
        (
            {"engine": "lightgbm"},
            "'xgboost.ubj' is of model_type 'xgboost_ubj'. Engines for it are: xgboost, onnxruntime",
        ),
    ],
)
def test_parameters_that_make_no_sense(tmp_path: Path, values: dict[str, str], words: str, two: Forest) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Opened(tmp_path, two, parameters(**values))
    assert words in refused.value.message


def test_parameters_without_a_meaning_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, two: Forest
) -> None:
    caplog.set_level(logging.INFO)
    config = parameters(
        storage_type="AUTO", algo="ALGO_AUTO", blocks_per_sm="0", chunk_size="4", EXECUTION_MODE="worker"
    ) | {"input": [INPUT], "output": [output(1)]}
    Opened(tmp_path, two, config)
    said = [message for message in caplog.messages if "no effect" in message]
    assert said == ["parameters of model 'm' that have no effect here: algo, blocks_per_sm, chunk_size, storage_type"]


# ---- Tensors ----


def wide(**more: Any) -> dict[str, Any]:
    return {"input": [{**INPUT, **more}], "output": [output(1)]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (wide(dims=[7]), "tensor 'input__0' has dims [7], but it has 5 features. Set dims: [5]"),
        (wide(dims=[-1, -1]), "tensor 'input__0' has dims [-1,-1], but it has 5 features. Set dims: [5]"),
        (wide(data_type="TYPE_STRING"), "tensor 'input__0' is of TYPE_STRING, and may be of: TYPE_BOOL, TYPE_UINT8"),
        ({"input": [INPUT, INPUT]}, "expects 2 inputs (input__0, input__0), tree models have one"),
        ({"output": [output(1), output(1, name="more")]}, "and not: output__0, more"),
        ({"output": [output(4)]}, "'output__0' has dims [4], but it gives 1 number for a row. Set dims: [1]"),
        ({"output": [output(1, kind="TYPE_INT32")]}, "is of TYPE_INT32, and may be of: TYPE_FP32, TYPE_FP64"),
        (
            {"output": [output(1), output(5, name="treeshap_output")]},
            "'treeshap_output' has dims [5], but there are 5 features and a bias for each number predicted. Set dims: "
            "[6]",
        ),
        (
            {"max_batch_size": 0, "input": [{**INPUT, "dims": [-1, 6]}], "output": [output(1)]},
            "tensor 'input__0' has dims [-1,6], but it has 5 features. Set dims: [-1, 5]",
        ),
    ],
)
def test_tensors_that_the_model_does_not_have(tmp_path: Path, config: dict[str, Any], words: str, two: Forest) -> None:
    message = refusal(tmp_path, two, config)
    assert message.startswith("unable to load model 'm', ")
    assert words in message


def test_a_class_where_probabilities_are_declared(tmp_path: Path, three: Forest) -> None:
    assert refusal(tmp_path, three, parameters(is_classifier="true") | {"output": [output(3)]}).endswith(
        "with 'is_classifier' and without 'predict_proba' it gives the number of a class. Set dims: [1]"
    )
    assert refusal(tmp_path, three, {"output": [output(1)]}).endswith(
        "it gives the probabilities of 3 classes (parameter 'is_classifier': 'true' for a class). Set dims: [3]"
    )


def test_classes_of_several_things(tmp_path: Path) -> None:
    message = refusal(tmp_path, xgboost("reg:squarederror", "pair"), parameters(is_classifier="true"))
    assert "it predicts 2 values at once" in message


def test_explanations_that_nobody_gives(tmp_path: Path, two: Forest) -> None:
    shap = {"output": [output(1), output(FEATURES + 1, name="treeshap_output")]}
    message = refusal(tmp_path, sklearn("RandomForestRegressor"), shap)
    assert message.endswith("onnxruntime does not explain predictions. Only XGBoost and LightGBM do, of theirs")
    message = refusal(tmp_path, two, parameters(engine="treelite") | shap | {"default_model_filename": "xgboost.ubj"})
    assert message.endswith("xgboost does: pip install xgboost, and KIND_CPU")


# ---- Engines ----


def without(monkeypatch: pytest.MonkeyPatch, *engines: str) -> None:
    """Let some libraries not be installed."""

    def missing(*arguments: object) -> Any:
        raise native.MissingLibrary

    for engine in engines:
        monkeypatch.setitem(ENGINES, engine, missing)


@pytest.mark.parametrize(
    ("missing", "engine"), [(["xgboost"], "onnxruntime"), (["xgboost", "onnxruntime"], "treelite")]
)
def test_without_the_library_of_a_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    two: Forest,
    missing: list[str],
    engine: str,
) -> None:
    caplog.set_level(logging.INFO)
    without(monkeypatch, *missing)
    np.testing.assert_allclose(Opened(tmp_path, two).prediction(), as_rows(two.predict(ROWS)), rtol=1e-6)
    reasons = "; ".join(f"{each} is not installed" for each in missing)
    assert f"model 'm' is computed by {engine}; {reasons}" in caplog.messages
    assert refusal(tmp_path, None, parameters(engine="xgboost")) == (
        "model 'm' has 'engine': 'xgboost', which is not installed: pip install xgboost"
    )


@pytest.mark.parametrize("kind", ["two", "three"])
def test_libraries_are_looked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    caplog.set_level(logging.INFO)
    path = save(request.getfixturevalue(kind), tmp_path)
    found = find_forest(ModelContext("m", 1, tmp_path, {}), "")
    assert found.path == path
    read = TreeliteForest("m", found)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for package in ("xgboost", "lightgbm", "treelite", "onnxruntime"):
        for module in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
    assert open_engine("m", read.description, "auto", 1, lambda: read).name == "treelite"
    own = {"two": "xgboost", "three": "lightgbm"}[kind]
    assert caplog.messages == [
        f"model 'm' is computed by treelite; {own} is not installed; onnxruntime is not installed"
    ]
    with pytest.raises(Unsupported, match=r"unable to open treelite \(treelite is not installed\): pip install"):
        TreeliteForest("m", found)


def test_a_library_that_cannot_read_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, two: Forest
) -> None:
    def too_new(*arguments: object) -> Any:
        raise native.NativeError("too new")

    caplog.set_level(logging.INFO)
    monkeypatch.setitem(ENGINES, "xgboost", too_new)
    np.testing.assert_allclose(Opened(tmp_path, two).prediction(), as_rows(two.predict(ROWS)), rtol=1e-6)
    assert "model 'm' is computed by onnxruntime; xgboost cannot: too new" in caplog.messages
    message = refusal(tmp_path, None, parameters(engine="xgboost"))
    assert message == "unable to load model 'm' with xgboost: too new"


def test_a_gpu_without_nvforest(tmp_path: Path, two: Forest) -> None:
    with pytest.raises(Unsupported, match="Set kind: KIND_CPU, or install it: pip install nvforest-cu13"):
        Opened(tmp_path, two, None, "GPU")


class StandIn:
    """In the place of nvForest's classifier, which needs a GPU: its interface as it is documented."""

    asked: ClassVar[dict[str, Any]] = {}

    @classmethod
    def load_model(cls, path: Path, **more: Any) -> StandIn:
        cls.asked = more
        return cls()

    def predict(self, rows: Any) -> Any:
        raise AssertionError("this is for classes")

    def predict_proba(self, rows: Any) -> Any:
        second = rows[:, :1] > 0
        return np.concatenate([1 - second, second], 1).astype(np.float64)


def test_what_nvforest_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: Forest) -> None:
    monkeypatch.setitem(sys.modules, "nvforest", StandIn)  # type: ignore[arg-type]
    wanted = parameters(chunk_size="8", layout="layered") | {"instance_group": [{"kind": "KIND_GPU"}]}
    answer = Opened(tmp_path, two, wanted, "GPU").prediction()
    assert StandIn.asked == {
        "model_type": "xgboost_ubj",
        "device": "gpu",
        "device_id": 0,
        "layout": "layered",
        "default_chunk_size": 8,
    }
    np.testing.assert_array_equal(answer, ROWS[:, :1] > 0)


def test_no_package_is_imported(tmp_path: Path, two: Forest, three: Forest) -> None:
    for forest in (two, three, sklearn("RandomForestRegressor")):
        save(forest, tmp_path / forest.filename)
    code = """
import sys
from pathlib import Path
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.registry import backend
for directory in Path(sys.argv[1]).iterdir():
    context = ModelContext("m", 1, directory, {"max_batch_size": 4})
    config = backend("fil").complete(context)
    backend("fil").open(ModelContext("m", 1, directory, config)).instance(InstanceContext("m_0"))
print(*{"treelite", "xgboost", "lightgbm", "scipy", "sklearn", "pandas"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_an_instance_that_comes_later_is_of_the_same_file(tmp_path: Path, two: Forest) -> None:
    opened = Opened(tmp_path, two, parameters(engine="treelite"))
    other = InstanceContext("m_1", sharing=10**6)
    opened.model.engines.clear()
    opened.model.instance(other)
    path = tmp_path / "1" / "xgboost.ubj"
    opened.model.engines.clear()
    path.write_bytes(path.read_bytes())
    with pytest.raises(Unavailable, match="has changed since model 'm' was loaded: load the model again"):
        opened.model.instance(other)


# ---- The end ----


@pytest.mark.parametrize("engine", ["auto", "treelite", "onnxruntime"])
def test_nothing_of_a_closed_model_stays(tmp_path: Path, engine: str, two: Forest) -> None:
    opened = Opened(tmp_path, two, parameters(engine=engine))
    opened.prediction()
    gone = [weakref.ref(engine) for engine in opened.model.engines.values()]
    assert gone
    gc.disable()
    try:
        opened.close()
        del opened
        assert [reference() for reference in gone] == [None]
    finally:
        gc.enable()


def resident() -> int:
    """Return the pages that this process has in memory, in KiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "make",
    [lambda: xgboost("multi:softprob", "three"), lambda: lightgbm("binary", "two"), lambda: sklearn("IsolationForest")],
    ids=["xgboost", "lightgbm", "sklearn"],
)
def test_a_hundred_loads_leave_nothing(tmp_path: Path, make: Callable[[], Forest]) -> None:
    forest = make()
    Opened(tmp_path, forest)

    def load() -> None:
        opened = Opened(tmp_path)
        opened.prediction()
        opened.close()

    for _ in range(25):
        load()
    growths = []
    while not growths or (growths[-1] >= 1024 and len(growths) < 4):  # a leak grows each time; a heap settles
        before = resident()
        for _ in range(100):
            load()
        gc.collect()
        growths.append(resident() - before)
    assert growths[-1] < 1024, growths
