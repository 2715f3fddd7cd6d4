"""What has been measured, in a file: a line of JSON for the conditions, and one for each configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from nerite.analyze.conditions import Conditions, differences
from nerite.analyze.finding import Finding
from nerite.core.errors import Internal, InvalidArgument

_Key: TypeAlias = tuple[str, int, tuple[int, ...]]
"""The configuration, how many times it was measured before, the levels."""


class Checkpoint:
    """Findings by configuration and turn. Each is in the file as soon as it is known."""

    def __init__(self, path: Path, conditions: Conditions) -> None:
        """Read the file, if there is one. Raises ``InvalidArgument`` if it is of other conditions, or something else.

        ``conditions`` are what figures depend on beside the configuration.
        """
        self.path = path
        self._conditions = conditions
        self._known: dict[_Key, Finding] = {}
        self._length = 0
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}.") from None
        self._read(data)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, config: str, turn: int, levels: Sequence[int]) -> Finding | None:
        """Return what a configuration showed at these levels when it had this turn."""
        return self._known.get((config, turn, tuple(levels)))

    def add(self, config: str, turn: int, finding: Finding) -> None:
        """Keep what was found. Raises ``Internal`` if it cannot be written."""
        self._keep(config, turn, finding)
        document = {"config": config, "turn": turn, **finding.to_json()}
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

    def _keep(self, config: str, turn: int, finding: Finding) -> None:
        levels = tuple(figure.concurrency for figure in finding.figures)
        self._known[config, turn, levels] = finding

    def _read(self, data: bytes) -> None:
        whole = data[: data.rfind(b"\n") + 1]
        if data and not whole.strip():
            raise InvalidArgument(f"{self.path} is no checkpoint.\n    Name another file with --checkpoint.")
        remedy = "Remove it to measure anew, or name another file with --checkpoint."
        for number, line in enumerate(whole.splitlines()):
            try:
                document = json.loads(line)
                if number:
                    self._keep(document["config"], document["turn"], Finding.from_json(document))
                elif set(document) != set(self._conditions):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                raise InvalidArgument(f"{self.path}:{number + 1} is no finding of an analysis.\n    {remedy}") from None
            if not number and (changed := differences(document, self._conditions)):
                told = "\n    ".join(changed)
                raise InvalidArgument(f"{self.path} has figures of other conditions.\n    {told}\n    {remedy}")
        self._length = len(whole)
