"""Versions of a model that stay loaded beside those that its version policy selects, such as for a rollout. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from nerite.config.loading import PolledModel, select_versions
from nerite.config.model_config import ModelVersionPolicy


class KeptVersions(NamedTuple):
    """Versions that stay loaded, and the one among them that serves requests which name none."""

    versions: frozenset[int]
    default: int

    def with_versions(self, versions: Iterable[int]) -> KeptVersions:
        """Return this with more versions."""
        return self._replace(versions=self.versions | {*versions})

    @property
    def optional(self) -> frozenset[int]:
        """The versions without which the model is ready."""
        return self.versions - {self.default}

    def absent(self, polled: PolledModel) -> list[int]:
        """Return the kept versions without a directory."""
        return sorted(self.versions.difference(polled.existing))

    def add_to(self, polled: PolledModel) -> tuple[int, ...]:
        """Return the versions to load: those that the version policy selects, and the kept ones that exist."""
        return tuple(sorted({*polled.versions, *self.versions.intersection(polled.existing)}))


def default_version(kept: KeptVersions | None, running: Collection[int]) -> int:
    """Return the version that serves requests which name none: the kept default if it runs, else the highest."""
    if kept is not None and kept.default in running:
        return kept.default
    return max(running, default=-1)


def remaining_versions(
    policy: ModelVersionPolicy, running: Collection[int], without: Collection[int], name: str
) -> tuple[int, ...]:
    """Return which of the ``running`` versions a version policy selects; never one in ``without``.

    The highest of the others if it selects none of them; empty if there are no others.
    """
    others = [version for version in running if version not in without]
    return select_versions(policy, others, name).numbers or ((max(others),) if others else ())
