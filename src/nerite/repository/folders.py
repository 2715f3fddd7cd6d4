"""Which directories are in use, and by whom: what nobody uses any more is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

GiveBack: TypeAlias = Callable[[], None]
"""What to do when a directory is not used any more. Blocks."""


class FoldersInUse:
    """Knows the directories that models were fetched to, or unpacked in. For the loop's thread."""

    def __init__(self) -> None:
        self._users: dict[Path, list[object]] = {}
        self._give_back: dict[Path, list[GiveBack]] = {}

    def take(self, folder: Path, user: object, give_back: GiveBack) -> None:
        """Note that ``user`` got a directory, and what is to be done in return.

        It is done when nobody uses the directory any more; sooner if it was taken more than once.
        """
        self._give_back.setdefault(folder, []).append(give_back)
        self.use(folder, user)

    def use(self, folder: Path, user: object) -> None:
        """Note one more user of a directory that somebody has."""
        self._users.setdefault(folder, []).append(user)

    def leave(self, user: object) -> list[GiveBack]:
        """Note that a user is done; return what is to be done in return."""
        due: list[GiveBack] = []
        for folder in [folder for folder, users in self._users.items() if user in users]:
            users, owed = self._users[folder], self._give_back[folder]
            users.remove(user)
            # One is enough to keep a directory for all who use it.
            kept = 1 if users else 0
            due += owed[kept:]
            del owed[kept:]
            if not users:
                del self._users[folder], self._give_back[folder]
        return due
