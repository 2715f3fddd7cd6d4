"""Interface of response caches, and what their implementations share: sizes and checks of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeAlias

from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument
from nerite.core.response import InferenceResponse
from nerite.observability.exposition import Page

Found: TypeAlias = Callable[[InferenceResponse | None], None]
"""Called once, on the loop's thread, with the response under a key; None for a miss."""


class ResponseCache(Protocol):
    """Stores responses by key. Used from the loop's thread only."""

    shared: bool
    """Shared with other servers: keys must identify the content of a model, not its load."""

    def lookup(self, key: bytes, found: Found) -> None:
        """Look up a response; ``found`` is called before this returns, or later if the cache is remote."""

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        """Store a copy of a successful response. Failures are logged."""

    def write_metrics(self, page: Page) -> None:
        """Write the cache's own metrics."""

    def close(self) -> None:
        """Release resources outside this process."""


# Memory of cached responses. Measured with ``tracemalloc`` (a test repeats that), and rounded up to the size of a
# dictionary that has just grown.

ENTRY: Final = 336
"""Bytes of the key, the dictionary entry, the response and the tuple of its tensors."""
PART: Final = 56
"""Bytes of a tensor in addition to its data."""


def response_bytes(response: InferenceResponse) -> int:
    """Return the bytes of memory that a response takes without its header, which responses may share."""
    return ENTRY + sum(PART + len(part) for part in response.data)


def refuse_unknown(cache: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` for the first unknown setting of a cache."""
    known = list(known)
    for name in settings:
        if name not in known:
            raise InvalidArgument(
                f"the cache '{cache}' has no setting '{name}'. Its settings are {bad_choice(name, known)}"
            )


def bad_choice(wrong: str, known: Iterable[str]) -> str:
    """Return the list of valid names, and the one that was probably meant."""
    known = list(known)
    near = nearest(wrong, known)
    return ", ".join(f"'{name}'" for name in known) + "." + (f" Did you mean '{near}'?" if near else "")
