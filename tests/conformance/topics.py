"""The modules of ``exchanges/``: one topic each, with the scene it is played in."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.exchange import Scene, Step


@dataclass(frozen=True)
class Topic:
    """A module of exchanges."""

    name: str
    purpose: str
    """The first line of the module's docstring."""
    scene: Scene
    exchanges: Mapping[str, Sequence[Step]]


def topics() -> list[Topic]:
    """All topics, those of one scene one after the other, so that a scene is set up once."""
    found = []
    for path in sorted((Path(__file__).parent / "exchanges").glob("*.py")):
        module = importlib.import_module(f"conformance.exchanges.{path.stem}")
        if hasattr(module, "EXCHANGES"):
            exchanges = {
                name: steps if isinstance(steps, list) else [steps] for name, steps in module.EXCHANGES.items()
            }
            purpose = (module.__doc__ or "").splitlines()[0]
            found.append(Topic(path.stem, purpose, module.SCENE, exchanges))
    return sorted(found, key=lambda topic: topic.scene.name)
