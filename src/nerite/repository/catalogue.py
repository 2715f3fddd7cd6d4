"""Every model that was ever loaded or tried, and which of them a name means. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from sys import getsizeof

from nerite.config.near import nearest
from nerite.core.byte_budget import REFUSALS, Memo
from nerite.core.errors import InvalidArgument, NeriteError, NotFound
from nerite.execution.running_version import RunningVersion
from nerite.repository.model_record import ModelRecord


class Catalogue:
    """Models by namespace and name. Without namespacing every namespace is empty, and a name means one model."""

    def __init__(self, *, namespacing: bool = False) -> None:
        self._namespacing = namespacing
        self._named: dict[str, dict[str, ModelRecord]] = {}
        self._near: Memo[str, str] = Memo()
        """What was meant by unknown names, empty for nothing: finding it takes a while, and clients ask again."""

    def __iter__(self) -> Iterator[ModelRecord]:
        """Give every model, by namespace and name."""
        records = [record for named in self._named.values() for record in named.values()]
        return iter(sorted(records, key=lambda record: (record.namespace, record.name)))

    def open(self, namespace: str, name: str) -> ModelRecord:
        """Return what is known of a model, from now on if it was not known."""
        named = self._named.setdefault(name, {})
        if namespace not in named:
            self._near.clear()
            named[namespace] = ModelRecord(name, namespace)
        return named[namespace]

    def record(self, namespace: str, name: str) -> ModelRecord | None:
        """Return what is known of a model."""
        return self._named.get(name, {}).get(namespace)

    def forget(self, record: ModelRecord) -> None:
        """Know nothing of a model any more."""
        self._near.clear()
        self._named[record.name].pop(record.namespace, None)

    def all_named(self, name: str) -> list[ModelRecord]:
        """Return every model of that name."""
        return list(self._named.get(name, {}).values())

    def meant(self, name: str) -> ModelRecord:
        """Return the model that a request means by ``name``. Raises Triton's refusals."""
        tried = [record for record in self._named.get(name, {}).values() if record.known]
        if not tried:
            raise self._unknown(name)
        if not self._namespacing:
            return tried[0]
        running = [record for record in tried if record.running]
        if not running:
            raise NotFound(f"Identifier of model '{name}' is not found in global map")
        if len(running) > 1:
            raise InvalidArgument(
                f"There are {len(running)} identifiers of model '{name}' in global map, "
                "model namespace must be provided to resolve ambiguity."
                "\n    A request cannot name a namespace: give the models different names."
            )
        return running[0]

    def part(self, own: str, namespace: str, name: str) -> ModelRecord | None:
        """Return the model that an ensemble of namespace ``own`` means; None if there is none, or more than one.

        That is the one in ``namespace`` if the ensemble names one; else its neighbour, unless that was unloaded or is
        about to be, else the only one that runs.
        """
        named = self._named.get(name, {})
        if not self._namespacing:
            return named.get("")
        if namespace:
            return named.get(namespace)
        neighbour = named.get(own)
        if neighbour is not None and not neighbour.gone:
            return neighbour
        running = [record for record in named.values() if record.running and not record.going]
        return running[0] if len(running) == 1 else neighbour

    def find(self, name: str, version: str, namespace: str = "") -> RunningVersion:
        """Return where a request for ``name`` goes, which means one model if ``namespace`` says of which repository.

        Raises Triton's refusals.
        """
        if not namespace:
            return self.meant(name).find(version)
        record = self.record(namespace, name)
        if record is None:
            raise self._unknown(name)
        return record.find(version)

    def _unknown(self, name: str) -> NeriteError:
        near = self._near.get(name)
        if near is None:
            others = (other for other, named in self._named.items() if any(record.known for record in named.values()))
            near = nearest(name, (other for other in others if other != name))
            REFUSALS.put(self._near, name, near, getsizeof(name) + getsizeof(near))
        unknown = f"Request for unknown model: '{name}' is not found" + (f" (did you mean '{near}'?)" if near else "")
        return InvalidArgument(unknown) if self._namespacing else NotFound(unknown)
