"""Finding backends by name."""

from __future__ import annotations

import importlib.util

import pytest

from nerite.backends import registry
from nerite.core.errors import InvalidArgument, Unsupported


def test_a_backend_is_one_object() -> None:
    found = registry.backend("onnxruntime")
    assert found.name == "onnxruntime"
    assert registry.backend("onnxruntime") is found


@pytest.mark.parametrize("name", registry.ENTRIES)
def test_every_entry_leads_to_a_backend_of_that_name(name: str) -> None:
    assert registry.backend(name).name == name


def test_an_unknown_backend() -> None:
    with pytest.raises(InvalidArgument) as refused:
        registry.backend("onnx")
    assert refused.value.message == (
        "unable to find backend library for backend 'onnx', try specifying runtime on the model configuration. The "
        "backends there are: onnxruntime, python."
    )


def test_a_missing_framework_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    registry.backend.cache_clear()
    with pytest.raises(Unsupported) as refused:
        registry.backend("onnxruntime")
    assert refused.value.message == (
        "backend 'onnxruntime' needs the Python package 'onnxruntime', which is not installed. Install it with: "
        "pip install 'nerite[onnx]'"
    )
    # Installed in the meantime: the refusal was not kept.
    monkeypatch.undo()
    assert registry.backend("onnxruntime").name == "onnxruntime"
