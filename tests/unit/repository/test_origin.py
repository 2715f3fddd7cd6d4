"""Where the answers of a version come from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nerite.config.model_config import ModelConfig, ModelEnsembling
from nerite.core.errors import NotFound
from nerite.repository.catalogue import version_origin


def version(name: str, number: int, content: str = "", *steps: tuple[str, int]) -> Any:
    ensemble = ModelEnsembling(
        step=tuple(ModelEnsembling.Step(model_name=model, model_version=of) for model, of in steps)
    )
    config = ModelConfig(name=name, ensemble_scheduling=ensemble if steps else None)
    return SimpleNamespace(name=name, label="1", number=number, content=content, config=config)


class Models:
    def __init__(self, *versions: Any) -> None:
        self.known = {(each.name, "", ""): each for each in versions}

    def find(self, model: str, version: str, namespace: str) -> Any:
        if (model, version, namespace) not in self.known:
            raise NotFound(f"no {model} {version}")
        return self.known[model, version, namespace]


def test_a_model() -> None:
    found = version("m", 7, "sha256:1")
    assert version_origin(found, Models().find, lasting=False) == "m/1/7"
    assert version_origin(found, Models().find, lasting=True) == "m/1/sha256:1"
    assert version_origin(version("m", 7), Models().find, lasting=True) == "", "not worked out yet"


def test_an_ensemble_is_what_it_is_made_of() -> None:
    models = Models(version("a", 1, "x"), version("b", 2, "y", ("a", -1)))
    outer = version("e", 3, "z", ("b", -1), ("a", -1))
    assert version_origin(outer, models.find, lasting=False) == "e/1/3 (b/1/2 (a/1/1)) (a/1/1)"
    assert version_origin(outer, models.find, lasting=True) == "e/1/z (b/1/y (a/1/x)) (a/1/x)"
    models.known["a", "", ""].content = ""
    assert version_origin(outer, models.find, lasting=True) == ""


def test_an_ensemble_without_one_of_its_models() -> None:
    assert version_origin(version("e", 3, "z", ("a", -1)), Models().find, lasting=False) == ""
    models = Models(version("a", 1))
    assert version_origin(version("e", 3, "z", ("a", 2)), models.find, lasting=False) == "", "the version counts, too"
