"""Where the answers of a version come from: from itself, and an ensemble's from the models that it is made of."""

from __future__ import annotations

from collections.abc import Callable

from nerite.core.errors import NeriteError
from nerite.execution.running_version import RunningVersion

Find = Callable[[str, str, str], RunningVersion]


def origin(running: RunningVersion, find: Find, *, lasting: bool) -> str:
    """Return a text that is another when a version may answer otherwise than before; empty if that is not known.

    ``find`` returns the running version that a model's name, version and namespace mean. ``lasting``: the text is the
    same wherever and whenever the same files are loaded; else it is one for each load.
    """
    made_from = running.content if lasting else str(running.number)
    if not made_from:
        return ""
    parts = [f"{running.name}/{running.label}/{made_from}"]
    ensemble = running.config.ensemble_scheduling
    for step in ensemble.step if ensemble is not None else ():
        try:
            version = str(step.model_version) if step.model_version > 0 else ""
            part = origin(find(step.model_name, version, step.model_namespace), find, lasting=lasting)
        except NeriteError:  # it is gone, and comes back perhaps
            return ""
        if not part:
            return ""
        parts.append(f"({part})")
    return " ".join(parts)
