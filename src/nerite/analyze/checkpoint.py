"""What has been measured, in a file: a line of JSON for the conditions, and one for each configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nerite.analyze.finding import Finding
from nerite.core.errors import Internal, InvalidArgument


class Checkpoint:
    """Findings by the text of their configurations. Each is in the file as soon as it is known."""

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        """Read the file, if there is one. Raises ``InvalidArgument`` if it is of other conditions, or something else.

        ``conditions`` are what figures depend on beside the configuration.
        """
        self.path = path
        self._conditions = dict(conditions)
        self._known: dict[str, Finding] = {}
        self._length = 0
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}.") from None
        self._read(data)
        self.found = len(self._known)
        """How many findings it had at the beginning."""

    def get(self, config: str) -> Finding | None:
        """Return what is known of a configuration."""
        return self._known.get(config)

    def add(self, config: str, finding: Finding) -> None:
        """Keep what was found. Raises ``Internal`` if it cannot be written."""
        self._known[config] = finding
        document = {"config": config, **finding.to_json()}
        head = [] if self._length else [self._conditions]
        lines = "".join(json.dumps(line) + "\n" for line in (*head, document)).encode()
        try:
            with self.path.open("r+b" if self._length else "wb") as file:
                # What a run that was stopped has left of a line goes.
                file.truncate(self._length)
                file.seek(self._length)
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise Internal(
                f"{self.path} cannot be written: {error.strerror}.\n    Name another --checkpoint."
            ) from None
        self._length += len(lines)

    def _read(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        if data and not whole.strip():
            raise InvalidArgument(f"{self.path} is no checkpoint.\n    Name another file with --checkpoint.")
        remedy = "Remove it to measure anew, or name another file with --checkpoint."
        for number, line in enumerate(whole.splitlines()):
            try:
                document = json.loads(line)
                if number:
                    self._known[document["config"]] = Finding.from_json(document)
            except (ValueError, KeyError, TypeError):
                raise InvalidArgument(f"{self.path}:{number + 1} is no finding of an analysis.\n    {remedy}") from None
            if not number and document != self._conditions:
                raise InvalidArgument(f"{self.path} has figures of other conditions.\n    {remedy}")
        self._length = len(whole)
