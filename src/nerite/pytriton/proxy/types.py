"""Requests and responses of inference callables: mappings of names to arrays."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from dataclasses import dataclass, field
from typing import Any

from nerite.core.tensor import Array


class _Arrays(MutableMapping[str, Array]):
    """A mapping whose content is its ``data``."""

    data: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.data[name]

    def __setitem__(self, name: str, array: Array) -> None:
        self.data[name] = array

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def items(self) -> ItemsView[str, Array]:
        """Return names and arrays."""
        return self.data.items()

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self.data.keys()

    def values(self) -> ValuesView[Array]:
        """Return the arrays."""
        return self.data.values()


@dataclass(eq=False)
class Request(_Arrays):
    """One request: its inputs by name, and its parameters together with forwarded headers."""

    data: dict[str, Array]
    parameters: dict[str, Any] | None = None
    span: Any = None
    requested_output_names: list[str] | None = field(default=None)


@dataclass(eq=False)
class Response(_Arrays):
    """One response: its outputs by name."""

    data: dict[str, Array]
