"""What is served and asked: a repository of links, and a load that fits the models."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nerite.config.model_config import ModelConfig, ModelInput, ModelSequenceBatching, ModelTransactionPolicy
from nerite.tools.analyze.search import Subject, Subjects, promise
from nerite.tools.analyze.trial import Load, staged
from nerite.tools.bench.measurement import Rule
from nerite.tools.bench.requests import TensorLoad


def model(repository: Path, name: str, text: str | None) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(name)
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    return folder


def test_the_repository_that_is_served_is_another(tmp_path: Path) -> None:
    model(tmp_path, "a", "# mine\nmax_batch_size: 1\n")
    model(tmp_path, "b", "max_batch_size: 2\n")
    model(tmp_path, "bare", None)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with staged(tmp_path, {"a": "max_batch_size: 8\n", "bare": ""}) as place:
        assert (place / "a" / "config.pbtxt").read_text() == "max_batch_size: 8\n"
        assert (place / "b" / "config.pbtxt").read_text() == "max_batch_size: 2\n"
        assert not (place / "bare" / "config.pbtxt").exists()
        assert [(place / name / "1" / "model.py").read_text() for name in ("a", "b", "bare")] == ["a", "b", "bare"]
    assert not place.exists()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_is_measured_is_what_would_be_written(tmp_path: Path) -> None:
    a = Subject.read(model(tmp_path, "a", "# mine\nmax_batch_size: 1\n"), ModelConfig(name="a", backend="python"))
    b = Subject.read(model(tmp_path, "b", None), ModelConfig(name="b", backend="python"))
    both = Subjects((a, b), prefixed=True)
    assert both.texts({"a.max_batch": 8}) == {"a": "# mine\nmax_batch_size: 8\n", "b": ""}
    assert both.texts({"b.instances": 2})["b"].split() == ["instance_group", "[", "{", "count:", "2", "}", "]"]
    # Comments do not tell configurations apart, models do.
    assert both.identity({"a.instances": 2}) != both.identity({"b.instances": 2})
    bare = Subject(a.path, "max_batch_size: 1\n", a.written, a.complete)
    assert Subjects((bare,)).identity({"instances": 2}) == Subjects((a,)).identity({"instances": 2})


def test_the_load_fits_the_models() -> None:
    def inputs(*names: str) -> tuple[ModelInput, ...]:
        return tuple(ModelInput(name=name) for name in names)

    configs = {
        "plain": ModelConfig(name="plain", input=inputs("x", "only")),
        "stream": ModelConfig(
            name="stream", input=inputs("x"), model_transaction_policy=ModelTransactionPolicy(decoupled=True)
        ),
        "sequence": ModelConfig(name="sequence", sequence_batching=ModelSequenceBatching()),
    }
    shapes = {"only": (2,), "stream.x": (3,)}
    load = Load(tuple(TensorLoad(name, shapes=shapes) for name in configs), (1,), Rule(), 1.0, beside=("other",))
    fitted = load.fitted(configs).asked
    assert [(each.streaming, each.sequence_length) for each in fitted] == [(False, 0), (True, 0), (False, 20)]
    assert [each.shapes for each in fitted] == [{"only": (2,)}, {"x": (3,)}, {}]
    assert load.models == ("plain", "stream", "sequence", "other")
    # Of one model, what it does not have is for the bench to refuse.
    alone = Load((TensorLoad("plain", shapes={"y": (1,)}),), (1,), Rule(), 1.0).fitted(configs).asked[0]
    assert alone.shapes == {"y": (1,)}


def test_what_promises_most_is_beyond_the_better_one() -> None:
    places = np.linspace(0, 1, 6)[:, None]
    promised = promise(places, [1, 3], [0, 1])
    assert int(promised.argmax()) in (4, 5)
    assert promised[1] == promised[3] == 0
    # Known on both sides, a place in between promises less than one that nothing is known of.
    assert promise(places, [0, 2], [1, 0])[1] < promise(places, [0, 2], [0, 1])[5]
