"""What is serving, as a hash: the same wherever and whenever the same files and configuration are loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from nerite.config.text_form import to_text
from nerite.repository import fingerprint
from nerite.repository.fingerprint import Entry
from nerite.repository.model_record import Loaded

_BLOCK: Final = 1 << 20
_MOST: Final = 10_000
"""Files that are remembered: of those that requests bring, each is a new one."""


class ContentHashes:
    """Reads files, each once as long as it looks the same. Blocks: for the loader's threads."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], bytes] = {}
        """By path, size and time of modification."""
        self._stopped = False

    def stop(self) -> None:
        """Give up what is being read: the server ends."""
        self._stopped = True

    def of_version(self, loaded: Loaded, version: int) -> str:
        """Return the hash of all that a version was made from; empty if that is no longer what the files say.

        How many instances there are, and which other versions, does not belong to it; how a configuration is written,
        neither.
        """
        polled, seen = loaded.polled, loaded.seen
        config = dataclasses.replace(polled.config, version_policy=None, instance_group=())
        digest = hashlib.sha256(to_text(config).encode("utf-8", "surrogateescape"))
        try:
            self._add(digest, polled.directory, seen.shared)
            self._add(digest, polled.directory / str(version), seen.versions.get(version, ()))
            if self._stopped or fingerprint.of_model(polled.directory) != seen:
                return ""
        except OSError:
            return ""
        return f"sha256:{digest.hexdigest()}"

    def _add(self, digest: hashlib._Hash, folder: Path, entries: Iterable[Entry]) -> None:
        digest.update(b"\0folder\0")
        for name, size, time_ns in entries:
            key = (str(folder / name), size, time_ns)
            if key not in self._known:
                if len(self._known) >= _MOST:
                    self._known.clear()
                self._known[key] = self._of_file(folder / name)
            digest.update(os.fsencode(name) + b"\0" + self._known[key])

    def _of_file(self, path: Path) -> bytes:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while not self._stopped and (block := file.read(_BLOCK)):
                digest.update(block)
        return digest.digest()
