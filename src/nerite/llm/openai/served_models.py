"""Which models the APIs under ``/v1`` serve, and under which names."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from nerite.config.mistake import nearest
from nerite.core.bounded_files import read_json
from nerite.core.errors import NeriteError, NotFound
from nerite.core.signature import Signature
from nerite.llm.openai import text_model
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.model_tasks import TASKS
from nerite.llm.openai.text_model import CallOrigin, ModelAddress, ModelPurpose

if TYPE_CHECKING:
    from nerite.core.servable_version import ServableVersion
    from nerite.inference_entry import TransportEntry

_OWNER: Final = "nerite"
ADAPTERS: Final = "multi_lora.json"
"""File with the names and directories of LoRA adapters."""
_PATTERN: Final = frozenset("*?[")
"""Characters of aliases that stand for others."""

_PURPOSES: Final = (text_model.TEXT, *(task.purpose for task in TASKS.values()))


class ServedModels:
    """Finds and lists the models that this API serves."""

    def __init__(self, server: TransportEntry, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        """``aliases`` are further names, as patterns, and the models that answer for them."""
        self._server = server
        self._aliases = aliases
        self._adapters: WeakKeyDictionary[ServableVersion, tuple[str, ...]] = WeakKeyDictionary()
        """Names of the LoRA adapters of models that run on an engine."""
        self.began = int(time.time())
        """Creation time reported for all models. The real one is unknown, but clients expect a time."""

    def find(
        self, name: str, call: CallOrigin, purpose: ModelPurpose = text_model.TEXT
    ) -> tuple[ServableVersion, ModelAddress]:
        """Return the version that answers a call, and what its requests have to name.

        A name that no model has may be that of a LoRA adapter, or an alias. Raises ``ApiError`` if it is unknown or has
        another purpose, and the server's error for a model that is not ready.
        """
        try:
            running, address = self._found(name, call)
        except NotFound:
            base = self._bases().get(name, "")
            meant = base or self._meant(name)
            if not meant:
                raise self._unknown(name) from None
            running, address = self._found(meant, call)
            if base:
                address = address._replace(lora=name)
        signature = running.signature
        if not purpose.serves(signature):
            raise ApiError(f"Model '{name}' {purpose.lack}.", "model", "model_not_supported")
        return running, address

    def _found(self, name: str, call: CallOrigin) -> tuple[ServableVersion, ModelAddress]:
        route = self._server.routes.get(name)
        if route is None:
            return self._server.find(name, "", ""), ModelAddress(name)
        running, model, version, assignment = self._server.assign(call.probe(route))
        if call.requests > 1 and not assignment.cluster:
            assignment = assignment._replace(cluster=secrets.randbits(62) + 1)
        return running, ModelAddress(model, version, assignment)

    def _meant(self, name: str) -> str:
        """Return the model that answers for a name; empty if the name is no alias."""
        return next((model for pattern, model in self._aliases.items() if fnmatchcase(name, pattern)), "")

    def _bases(self) -> dict[str, str]:
        """Return the model that each LoRA adapter belongs to."""
        bases: dict[str, str] = {}
        for running in self._server.running_versions():
            if not running.generates:
                continue
            names = self._adapters.get(running)
            if names is None:
                names = self._adapters[running] = _adapters_in(self._server.version_directory(running))
            for name in (*names, *running.runtime_adapters):
                bases.setdefault(name, running.name)
        return bases

    def listed(self) -> list[dict[str, Any]]:
        """Return the descriptions of all models that this API serves."""
        found = []
        names = {route.name for route in self._server.routes}.union(
            alias for alias in self._aliases if not _PATTERN.intersection(alias)
        )
        running = (running.name for running in self._server.running_versions())
        for name in sorted(names.union(running, self._server.loadable)):
            try:
                found.append(self.describe(name))
            except NeriteError:  # another kind of model, or an ambiguous name
                continue
        own = {each["id"] for each in found}
        found += [self.describe(name) for name in sorted(self._bases()) if name not in own]
        return found

    def describe(self, name: str) -> dict[str, Any]:
        """Return the description of a model. Raises ``ApiError`` if this API does not serve it."""
        if task := self._server.loadable.get(name):
            return {**describe_model(name, self.began), "task": task}
        try:
            signature = self._server.signature(name, "")
        except NotFound:
            base = self._bases().get(name)
            if base is not None:
                return {**describe_model(name, self.began), "root": name, "parent": base}
            meant = self._meant(name)
            if not meant:
                raise self._unknown(name) from None
            signature = self._server.signature(meant, "")
        task = next((purpose.task for purpose in _PURPOSES if purpose.serves(signature)), "")
        if not task:
            raise self._unknown(name)
        return {**describe_model(name, self.began), "task": task}

    def _unknown(self, name: str) -> ApiError:
        names = {running.name for running in self._server.running_versions() if _answers(running.signature)}
        return unknown_model(name, sorted(names))


def _adapters_in(version: Path | None) -> tuple[str, ...]:
    """Return the names of the adapters of a model. The engine has validated their file."""
    if version is None:
        return ()
    try:
        found = read_json(version / ADAPTERS)
    except (OSError, ValueError):
        return ()
    return tuple(found) if isinstance(found, dict) else ()


def unknown_model(name: str, names: Collection[str], status: int = 404) -> ApiError:
    """Return the error for a model that is not one of ``names``."""
    meant = nearest(name, names)
    hint = f". Did you mean '{meant}'?" if meant and meant != name else ""
    return ApiError(f"Unknown model: {name}{hint}", "model", "model_not_found", status)


def describe_model(name: str, made: int) -> dict[str, Any]:
    """Return the description of a model. ``made`` is its creation time in seconds."""
    return {"id": name, "object": "model", "created": made, "owned_by": _OWNER}


def _answers(signature: Signature) -> bool:
    return any(purpose.serves(signature) for purpose in _PURPOSES)
