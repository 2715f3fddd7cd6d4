"""Which of an engine's optimisation profiles an instance has, and which of these takes a batch. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nerite.backends.tensorrt.description import Profile, Shape
from nerite.core.errors import InvalidArgument


def of_group(model: str, group: Mapping[str, Any], there: int) -> tuple[int, ...]:
    """Return the indices of the profiles that an instance group names; the first, where it names none.

    ``there``: how many the engine has. Raises ``InvalidArgument`` for one that it does not have.
    """
    chosen = []
    for word in group.get("profile") or ("0",):
        if not word.isdecimal() or int(word) >= there:
            has = "the profile 0 alone" if there == 1 else f"the profiles 0 to {there - 1}"
            raise InvalidArgument(
                f"unable to load model '{model}', instance group '{group.get('name', '')}' has profile: \"{word}\", "
                f"and the engine has {has}"
            )
        chosen.append(int(word))
    return tuple(dict.fromkeys(chosen))


def group_of(config: Mapping[str, Any], instance: str) -> Mapping[str, Any]:
    """Return the instance group that an instance is of, by its name: that of the group and a number."""
    groups: Sequence[Mapping[str, Any]] = config.get("instance_group") or ({},)
    name = instance.rpartition("_")[0]
    return next((group for group in groups if group.get("name") == name), groups[0])


def choose(model: str, profiles: Mapping[int, Profile], shapes: Mapping[str, Shape]) -> int:
    """Return the index of the profile that was made for shapes the most like ``shapes``, of those that take them.

    Raises ``InvalidArgument`` where none does.
    """
    fitting = [index for index, profile in profiles.items() if not any(_breaches(profile, shapes))]
    if not fitting:
        name, detail = next(breach for profile in profiles.values() for breach in _breaches(profile, shapes))
        others = "" if len(profiles) == 1 else f". None of the profiles {', '.join(map(str, profiles))} takes it"
        raise InvalidArgument(
            f"request specifies invalid shape for input '{name}' for {model}. Error details: {detail}{others}"
        )
    return min(fitting, key=lambda index: _distance(profiles[index], shapes))


def _breaches(profile: Profile, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield the inputs that a profile does not take, and why."""
    for name, bounds in profile.items():
        shape = shapes[name]
        if len(shape) != len(bounds.most):
            yield name, f"model expected {len(bounds.most)} dimensions but received {len(shape)} dimensions"
            continue
        for place, (size, least, most) in enumerate(zip(shape, bounds.least, bounds.most, strict=True)):
            if not least <= size <= most:
                yield (
                    name,
                    f"model expected the shape of dimension {place} to be between {least} and {most} but received "
                    f"{size}",
                )


def _distance(profile: Profile, shapes: Mapping[str, Shape]) -> int:
    return sum(
        abs(size - best)
        for name, bounds in profile.items()
        for size, best in zip(shapes[name], bounds.best, strict=True)
    )
