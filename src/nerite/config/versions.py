"""The version directories of a model: which there are, and which of them a version policy serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from nerite.config.model_config import ModelVersionPolicy

_OTHER_DIRECTORIES: Final = frozenset({"warmup", "initial_state", "configs"})
"""Directories of a model that have a meaning of their own and are no versions."""
_LARGEST: Final = 2**63 - 1


class Versions(NamedTuple):
    """The versions that were found, in ascending order, and what to tell about the directories that are none."""

    numbers: tuple[int, ...]
    warnings: tuple[str, ...] = ()


class Selection(NamedTuple):
    """The versions to serve, in ascending order, and what to tell about those that are asked for and missing."""

    numbers: tuple[int, ...]
    errors: tuple[str, ...] = ()


def find_versions(subdirectories: Iterable[str]) -> Versions:
    """Tell the versions among the names of a model's subdirectories. The warnings are Triton's log lines."""
    numbers, warnings = [], []
    for name in sorted(subdirectories):
        if name in _OTHER_DIRECTORIES:
            continue
        if len(name) > 1 and name.startswith("0"):
            reason = "which contains leading zeros in its directory name"
        elif name.isascii() and name.isdigit() and int(name[:20]) <= _LARGEST:
            numbers.append(int(name))
            continue
        else:
            reason = "which fails to convert to integral number"
        warnings.append(f"ignore version directory '{name}' {reason}")
    return Versions(tuple(sorted(numbers)), tuple(warnings))


def select_versions(policy: ModelVersionPolicy, existing: Iterable[int], model: str) -> Selection:
    """Choose among the ``existing`` versions. The errors are Triton's log lines; the other versions still load."""
    numbers = sorted(existing)
    if policy.specific is not None:
        wanted = dict.fromkeys(policy.specific.versions)
        errors = [
            f"version {version} is specified for model '{model}', but the version directory is not present"
            for version in wanted
            if version not in numbers
        ]
        return Selection(tuple(version for version in numbers if version in wanted), tuple(errors))
    if policy.latest is not None:
        count = policy.latest.num_versions
        return Selection(tuple(numbers[len(numbers) - min(count, len(numbers)) :]))
    return Selection(tuple(numbers))
