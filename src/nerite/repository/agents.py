"""What repository agents that a model names have to say before it is loaded. There is one: ``checksum``.

    model_repository_agents { agents [ { name: "checksum", parameters { key: "MD5:1/model.onnx", value: "d726…" } } ] }

Triton's is a shared library with these texts; other libraries of that kind cannot be loaded here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

from nerite.config.loading import PolledModel
from nerite.config.mistake import FieldPath, Mistake
from nerite.config.model_config import RepositoryAgent
from nerite.core.errors import Internal, Unsupported

CHECKSUM = "checksum"


def consulted(polled: PolledModel) -> PolledModel:
    """Return the model with the mistakes that its agents find. Blocks while files are read."""
    mistakes = mistakes_of(polled)
    return dataclasses.replace(polled, mistakes=(*polled.mistakes, *mistakes)) if mistakes else polled


def mistakes_of(polled: PolledModel) -> list[Mistake]:
    """Return what the agents of a model find wrong with it. Blocks while files are read. Never raises."""
    chosen = polled.config.model_repository_agents
    found: list[Mistake] = []
    for index, agent in enumerate(chosen.agents if chosen is not None else ()):
        place: FieldPath = ("model_repository_agents", "agents", index)
        if agent.name == CHECKSUM:
            found += _check_sums(agent, polled.directory, place)
        else:
            found.append(_unknown(agent.name, place))
    return polled.text.source.place(found)


def _unknown(name: str, place: FieldPath) -> Mistake:
    message = f"unable to find 'libtritonrepoagent_{name}.so' for repo agent '{name}'"
    remedy = f"Remove it, or name the agent that there is: '{CHECKSUM}'. Agents that are libraries cannot be loaded."
    return Mistake(message=message, path=(*place, "name"), remedy=remedy, error=Internal)


def _check_sums(agent: RepositoryAgent, directory: Path, place: FieldPath) -> Iterator[Mistake]:
    """Compare each file that the parameters name with its sum."""
    for key, expected in agent.parameters.items():
        path: FieldPath = (*place, "parameters", key)
        algorithm, colon, name = key.partition(":")
        remedy = 'Write it as in: parameters { key: "MD5:1/model.onnx", value: "d726e132f91f16ebee703d96f6f73cb1" }'
        if not colon:
            yield Mistake(message=f"failed to parse key: {key}", path=path, remedy=remedy)
            continue
        if algorithm.lower() != "md5":
            message = f"Unsupported checksum algorithm: {algorithm}"
            yield Mistake(message=message, path=path, remedy=remedy, error=Unsupported)
            continue
        try:
            with open(directory / name, "rb") as file:
                got = hashlib.file_digest(file, _md5).hexdigest()
        except OSError as error:
            message = f"failed to open text file for read {name}: {error.strerror}"
            yield Mistake(message=message, path=path, remedy="Name a file relative to the model's directory.")
            continue
        if got != expected.lower():
            message = f"Mismatched MD5 hash for file {name}, expect: {expected}, got: {got}"
            remedy = "Bring back the file that was meant, or write the sum of the one that is there."
            yield Mistake(message=message, path=path, remedy=remedy)


def _md5() -> hashlib._Hash:
    # Against accidents, not against attackers: so it may also be used where MD5 is forbidden for signatures.
    return hashlib.md5(usedforsecurity=False)
