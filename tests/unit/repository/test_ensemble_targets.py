"""Which models go with an ensemble."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nerite.config.model_config import ModelEnsembling
from nerite.repository.catalogue import Catalogue, ModelRecord
from nerite.repository.ensembles import EnsembleLinker
from nerite.routes.table import RouteTable


class Bench:
    """Models that all run, and were loaded for the sake of the ensembles."""

    def __init__(self, *, namespacing: bool = False) -> None:
        self.catalogue = Catalogue(namespacing=namespacing)
        maker: Any = None
        self.ensembles = EnsembleLinker(self.catalogue, maker, lambda *_: None, lambda _: [], RouteTable())

    def model(self, name: str, *steps: str, namespace: str = "") -> ModelRecord:
        record = self.catalogue.open(namespace, name)
        running: Any = object()
        record.running[1] = running
        if steps:
            assembly: Any = SimpleNamespace(steps=[ModelEnsembling.Step(model_name=each) for each in steps])
            record.assembly = assembly
        return record

    def spare(self, record: ModelRecord) -> list[str]:
        return [f"{each.namespace}{each.name}" for each in self.ensembles.spare_without(record)]


def test_what_is_there_for_an_ensemble_alone() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.model(name)
    inner = bench.model("inner", "a", "b")
    outer = bench.model("outer", "inner", "c", "c")
    assert bench.spare(inner) == ["a", "b"]
    assert bench.spare(outer) == ["inner", "c", "a", "b"], "ensembles before what they are made of"
    bench.model("other", "b")
    inner.asked = True
    assert bench.spare(outer) == ["c"]
    assert bench.spare(inner) == ["a"]


def test_an_ensemble_of_another_namespace_needs_its_own() -> None:
    bench = Bench(namespacing=True)
    for namespace in ("/x/", "/y/"):
        bench.model("a", namespace=namespace)
        bench.model("chain", "a", "shared", namespace=namespace)
    bench.model("shared", namespace="/y/")
    chain = bench.catalogue.record("/x/", "chain")
    assert chain is not None
    assert bench.spare(chain) == ["/x/a"], "and the only model of a name may be needed by both"
