"""Configurations of models in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nerite.config.json_form import from_json, to_json


def as_backends_get_it(config: Mapping[str, Any], name: str = "m") -> dict[str, Any]:
    """Return a configuration as the server hands it to backends: with the fields of the schema, and their defaults."""
    return to_json(from_json({"name": name, **config}))
