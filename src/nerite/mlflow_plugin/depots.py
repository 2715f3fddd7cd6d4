"""Where deployments are kept: a folder that the server can reach, too, or an object store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nerite.core.errors import NeriteError
from nerite.intake.addition import add
from nerite.intake.order import Order
from nerite.intake.outcome import Outcome
from nerite.intake.removal import remove

if TYPE_CHECKING:
    from nerite.repository.remote.repository import RemoteRepository


class Depot(Protocol):
    """A model repository that deployments are put into. Every method raises ``NeriteError`` if it cannot."""

    def note(self, name: str, file: str) -> bytes | None:
        """Return the content of a file in a model's directory; None: there is no such."""

    def add(self, order: Callable[[Path], Order], confirm: Callable[[], None]) -> Outcome:
        """Add a model, in the repository that ``order`` is told. If ``confirm`` raises, all is as it was."""

    def remove(self, name: str) -> None:
        """Remove a model, if it is there."""


class Folder:
    """A repository in a folder."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def note(self, name: str, file: str) -> bytes | None:
        """Return the content of a file in a model's directory."""
        try:
            return (self._place / name / file).read_bytes()
        except OSError:
            return None

    def add(self, order: Callable[[Path], Order], confirm: Callable[[], None]) -> Outcome:
        """Add a model."""
        return add(order(self._place), _Silent(), confirm)

    def remove(self, name: str) -> None:
        """Remove a model, if it is there."""
        directory = self._place / name
        if directory.is_dir():
            remove(self._place, directory)


class Bucket:
    """A repository in an object store: a model is laid out in a folder here, and goes there as a whole."""

    def __init__(self, remote: RemoteRepository) -> None:
        self._remote = remote

    def note(self, name: str, file: str) -> bytes | None:
        """Return the content of a file in a model's directory."""
        return self._remote.content(name, file)

    def add(self, order: Callable[[Path], Order], confirm: Callable[[], None]) -> Outcome:
        """Add a model."""
        with tempfile.TemporaryDirectory(prefix="nerite-") as aside:
            wanted = order(Path(aside))
            laid_out = wanted.repository / wanted.name
            with self._as_it_is(wanted.name) as before:
                if before is not None:
                    shutil.copytree(before, laid_out)

                def publish() -> None:
                    try:
                        self._remote.publish(wanted.name, laid_out)
                        confirm()
                    except BaseException:
                        if before is not None:
                            self._remote.publish(wanted.name, before)
                        else:
                            self._remote.remove(wanted.name)
                        raise

                try:
                    return add(wanted, _Silent(), publish)
                except NeriteError as error:
                    # Where it was laid out is nothing that anybody will find.
                    raise type(error)(error.message.replace(aside, self._remote.location)) from None

    def remove(self, name: str) -> None:
        """Remove a model, if it is there."""
        self._remote.remove(name)

    @contextmanager
    def _as_it_is(self, name: str) -> Iterator[Path | None]:
        directory = self._remote.fetch(name)
        try:
            yield directory
        finally:
            if directory is not None:
                self._remote.release(directory)


class _Silent:
    """Looks on, says nothing, and takes no settings but those of the model."""

    def copied(self, done: int, total: int) -> None:
        """Say nothing."""

    def doing(self, what: str) -> None:
        """Say nothing."""

    def accepts(self, outcome: Outcome) -> bool:
        """Leave the settings as they are."""
        return False
