"""The array backend in docs/custom-backends.md fulfils the contract, and the base of array backends does its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.backends.interface import InstanceContext
from nerite.core.errors import Internal, InvalidArgument, Unavailable
from nerite.testing import BackendContract
from opened import Opened, context
from pages import Page

WEIGHTS = np.arange(8, dtype=np.float32).reshape(4, 2)


def _tinynet() -> Any:
    names: dict[str, Any] = {"__name__": "nerite_tinynet"}
    exec(Page("docs/custom-backends.md").block("class TinyBackend"), names)
    return names["TinyBackend"]()


TINYNET = _tinynet()


def written(directory: Path) -> Path:
    (directory / "1").mkdir(parents=True)
    np.save(directory / "1" / "model.npy", WEIGHTS)
    return directory


class TestTinynet(BackendContract):
    backend = TINYNET

    def write_model(self, directory: Path) -> None:
        written(directory)
        (directory / "config.pbtxt").write_text('backend: "tinynet"')

    def requests(self) -> list[dict[str, Any]]:
        return [{"x": [[1, 2, 3, 4]]}, {"x": [[0, 0, 1, 0]]}]

    def answer(self, inputs: Any) -> dict[str, Any]:
        return {"y": np.asarray(inputs["x"], np.float32) @ WEIGHTS}


def test_instances_with_equal_keys_share_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Any] = []
    load = TINYNET.model.load
    monkeypatch.setattr(TINYNET.model, "load", lambda model, key: loads.append(key) or load(model, key))
    opened = Opened(TINYNET, context(written(tmp_path), TINY_THREADS="3"))
    opened.model.instance(InstanceContext("m_1"))
    assert [key.threads for key in loads] == [3]


def test_exceptions_of_the_computation_are_translated(tmp_path: Path) -> None:
    opened = Opened(TINYNET, context(written(tmp_path)))
    with pytest.raises(Internal, match=r"^tinynet error: matmul"):
        opened.answer(x=np.ones((1, 5), np.float32))


def test_errors_of_the_artifact(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"unable to find '.*/1/model\.npy' for model instance 'm'"):
        TINYNET.complete(context(tmp_path))
    (written(tmp_path) / "1" / "model.npy").write_bytes(b"something else")
    with pytest.raises(InvalidArgument, match="is not a tinynet model"):
        TINYNET.complete(context(tmp_path))
