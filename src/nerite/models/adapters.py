"""LoRA adapters that a running model version is given, and loses again, while it answers requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from nerite.core.errors import InvalidArgument, NeriteError, NotFound, Unsupported
from nerite.instances.instance import ModelInstance
from nerite.workers.host.instance import RemoteInstance


class VersionAdapters:
    """Adapters that a version has beside those of its files. All its instances have them, also after a restart.

    For the loop's thread only. One change at a time.
    """

    def __init__(self, model: str, instances: Callable[[], Sequence[ModelInstance]]) -> None:
        self._model = model
        self._instances = instances
        self._paths: dict[str, str] = {}
        self._changing = asyncio.Lock()

    @property
    def paths(self) -> Mapping[str, str]:
        """The directories of the adapters by their names."""
        return self._paths

    async def load(self, name: str, path: str) -> None:
        """Load an adapter in all instances; in none if one cannot load it. Raises ``NeriteError``."""
        async with self._changing:
            if name in self._paths:
                raise InvalidArgument(f"the LoRA adapter '{name}' has already been loaded")
            loaded: list[RemoteInstance] = []
            try:
                for instance in self._workers(self._instances()):
                    await instance.change_adapter(name, path)
                    loaded.append(instance)
            except NeriteError:
                for instance in loaded:
                    with contextlib.suppress(NeriteError):
                        await instance.change_adapter(name, "")
                raise
            self._paths[name] = path

    async def unload(self, name: str) -> None:
        """Unload an adapter; requests that use it are answered with it. Raises ``NeriteError``."""
        async with self._changing:
            if name not in self._paths:
                raise NotFound(f"the LoRA adapter '{name}' cannot be found among those that were loaded")
            del self._paths[name]
            for instance in self._workers(self._instances()):
                await instance.change_adapter(name, "")

    async def equip(self, instances: Iterable[ModelInstance]) -> None:
        """Load all adapters in new instances. Raises ``NeriteError``."""
        if not self._paths:
            return
        for instance in self._workers(instances):
            for name, path in self._paths.items():
                await instance.change_adapter(name, path)

    def _workers(self, instances: Iterable[ModelInstance]) -> list[RemoteInstance]:
        found = list(instances)
        workers = [each for each in found if isinstance(each, RemoteInstance)]
        if len(workers) < len(found) or not workers:
            raise Unsupported(f"model '{self._model}' has no engine that loads LoRA adapters")
        return workers
