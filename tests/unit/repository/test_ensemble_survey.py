"""What is wrong between ensembles and their models, by their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nerite.config.loading import CompletionUnavailable, LoadedModel, load_model_directory
from nerite.config.model_config import ModelConfig
from nerite.repository.ensembles import DescribedModel, EnsembleSurvey, EnsembleVerdict
from serving import IDENTITY, ensemble, pbtxt, python_model, step


class Repositories:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uncompleted: set[str] = set()
        self.wrong: set[str] = set()

    def model(self, name: str, repository: str = "a", **more: Any) -> None:
        python_model(self.folder / repository, name, IDENTITY, pbtxt(**{"batch": 1, "more": "", **more}))

    def ensemble(self, name: str, *models: str, repository: str = "a", outputs: tuple[str, ...] = ("OUTPUT0",)) -> None:
        """Write an ensemble whose models follow one another."""
        tensors = ["INPUT0", *(f"t{at}" for at in range(1, len(models))), "OUTPUT0"]
        steps = [step(model, *tensors[at : at + 2]) for at, model in enumerate(models)]
        ensemble(self.folder / repository, name, *steps, outputs=outputs)

    def verdict(self, name: str, repository: str = "a") -> EnsembleVerdict:
        models = {}
        for path in self.folder.glob("*/*"):
            loaded = self._loaded(path)
            assert not loaded.mistakes
            models[path.parent, path.name] = DescribedModel(loaded, sound=path.name not in self.wrong)
        return EnsembleSurvey(models, {}).verdict((self.folder / repository, name))

    def _loaded(self, path: Path) -> LoadedModel:
        def complete(config: ModelConfig, version: int) -> Mapping[str, Any] | None:
            if path.name in self.uncompleted:
                raise CompletionUnavailable("not installed")
            return None

        return load_model_directory(path, complete=complete)

    def told(self, name: str, repository: str = "a") -> list[str]:
        """Return mistakes and remarks of a model."""
        verdict = self.verdict(name, repository)
        return [*(mistake.message for mistake in verdict.mistakes), *(remark.text for remark in verdict.remarks)]


@pytest.fixture
def of(tmp_path: Path) -> Repositories:
    return Repositories(tmp_path)


def test_nothing_is_wrong(of: Repositories) -> None:
    of.model("one")
    of.ensemble("inner", "one", "one")
    of.ensemble("outer", "inner", "one")
    assert of.told("outer") == of.told("one") == []
    assert of.verdict("outer").configs.keys() == {1}


def test_types_are_compared_at_their_place(of: Repositories) -> None:
    of.model("one")
    of.model("other", datatype="TYPE_INT32")
    of.ensemble("chain", "one", "other")
    first, second = of.verdict("chain").mistakes
    assert first.message == (
        "in ensemble chain, ensemble tensor t1: inconsistent data type: TYPE_FP32 is inferred from model one while "
        "TYPE_INT32 is inferred from model other"
    )
    assert first.place.startswith(f"{of.folder}/a/chain/config.pbtxt:4:")
    assert "tensor OUTPUT0" in second.message


def test_a_model_that_there_is_not(of: Repositories) -> None:
    of.model("one")
    of.ensemble("chain", "one", "none")
    of.wrong.add("one")
    assert of.told("chain") == ["ensemble chain contains models that are not available or ambiguous: none"]


def test_a_version_that_is_not_served(of: Repositories) -> None:
    of.model("one")
    of.ensemble("chain", "one")
    config = of.folder / "a" / "chain" / "config.pbtxt"
    config.write_text(config.read_text().replace("model_version: -1", "model_version: 3"))
    (mistake,) = of.verdict("chain").mistakes
    assert mistake.message == "ensemble 'chain' depends on 'one' whose required version 3 is not loaded."
    assert mistake.remedy == "Write model_version: -1 for the latest version, or one that is loaded: 1."


def test_what_is_wrong_further_down_is_told_there(of: Repositories) -> None:
    of.ensemble("inner", "none")
    of.ensemble("outer", "inner")
    of.ensemble("outmost", "outer")
    assert len(of.verdict("inner").mistakes) == 1
    assert of.told("outer") == ["not checked against 'inner', which has mistakes of its own"]
    assert of.told("outmost") == ["not checked against 'outer', which could not be checked itself"]


def test_what_is_not_completed_is_not_compared(of: Repositories) -> None:
    of.model("one", datatype="TYPE_INT32")
    of.ensemble("chain", "one")
    assert len(of.verdict("chain").mistakes) == 2
    of.uncompleted.add("one")
    (told,) = of.told("chain")
    assert told.startswith("not checked against 'one', which is not completed here;")


def test_circles(of: Repositories) -> None:
    of.ensemble("a", "b")
    of.ensemble("b", "c")
    of.ensemble("c", "b")
    of.ensemble("self", "self")
    assert of.told("a") == ["not checked against 'b', which has mistakes of its own"]
    assert of.told("b") == ["circular dependency between ensembles: b -> ... -> c -> b"]
    assert of.told("c") == ["circular dependency between ensembles: c -> ... -> b -> c"]
    assert of.told("self") == ["circular dependency between ensembles: self -> ... -> self -> self"]


def test_streams_reach_through_ensembles(of: Repositories) -> None:
    of.model("one")
    of.model("stream", more="model_transaction_policy { decoupled: true }")
    of.ensemble("inner", "stream")
    ensemble(
        of.folder / "a",
        "both",
        step("inner", "INPUT0", "LEFT"),
        step("one", "INPUT0", "RIGHT"),
        outputs=("LEFT", "RIGHT"),
    )
    (told,) = of.told("both")
    assert told.endswith("receives inputs originated from different decoupled models")


def test_models_of_other_repositories(of: Repositories) -> None:
    for repository in ("a", "b"):
        of.model("in_two", repository)
    of.model("in_one", "b", datatype="TYPE_INT32")
    of.ensemble("beside", "in_two", repository="b")
    of.ensemble("elsewhere", "in_one")
    of.ensemble("neither", "in_two", repository="c")
    assert of.told("beside", "b") == []
    assert "inferred from model in_one" in of.told("elsewhere")[0]
    assert of.told("neither", "c") == ["ensemble neither contains models that are not available or ambiguous: in_two"]
