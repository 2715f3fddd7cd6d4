"""The repository index: every model that the repositories have, with the state of its versions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from nerite.repository.catalogue import Catalogue
from nerite.repository.model_record import ModelRecord, State

Entry: TypeAlias = dict[str, str]
IN_SEVERAL = "model appears in two or more repositories"


def entries(offered: Mapping[str, Iterable[str]], catalogue: Catalogue, *, ready_only: bool = False) -> list[Entry]:
    """Return the index. ``offered`` has the names of the models in each namespace, one more time for each place.

    A model that still runs although its directory is gone is not among them, as with Triton.
    """
    listed: list[Entry] = []
    for namespace, names in sorted(offered.items()):
        names = sorted(names)
        for name in dict.fromkeys(names):
            listed += _of_model(name, catalogue.record(namespace, name), names.count(name), ready_only=ready_only)
    return listed


def _of_model(name: str, record: ModelRecord | None, places: int, *, ready_only: bool) -> Iterator[Entry]:
    if places > 1:  # even in an index of what is ready, as with Triton
        yield {"name": name, "state": State.UNAVAILABLE.value, "reason": IN_SEVERAL}
    elif record is None or not record.states:
        if not ready_only:
            broken = record is not None and record.unreadable
            yield {"name": name} | ({"state": State.UNAVAILABLE.value, "reason": broken} if broken else {})
    else:
        for version, state in sorted(record.states.items()):
            if ready_only and state.state is not State.READY:
                continue
            entry = {"name": name}
            if version >= 0:
                entry["version"] = str(version)
            entry["state"] = state.state.value
            if state.reason:
                entry["reason"] = state.reason
            running = record.running.get(version)
            if state.state is State.READY and running is not None and running.content:
                entry["content_hash"] = running.content
            yield entry
