"""Adding a model: recognised, laid out aside, tried, measured, put in its place. A failure leaves nothing behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nerite.artifacts.artifact import Artifact
from nerite.artifacts.candidate import Candidate
from nerite.artifacts.recognition import recognise
from nerite.config.loading import CONFIG_FILE
from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument, NotFound
from nerite.intake.declared import declared
from nerite.intake.destination import Destination, check_name, destination, fit_name
from nerite.intake.order import Order, Watcher
from nerite.intake.outcome import Outcome
from nerite.intake.rehearsal import rehearse
from nerite.intake.staging import Staging


def add(order: Order, watcher: Watcher, confirm: Callable[[], None] | None = None) -> Outcome:
    """Bring a model into a repository. Raises ``NeriteError``, and then nothing has changed.

    ``confirm`` is called when the model is in its place; if it raises, the model is taken out again.
    """
    artifact = recognise(
        Candidate(order.source, class_place=order.class_place, flavor=order.flavor, trusted=order.trusted)
    )
    name = check_name(order.name) if order.name else fit_name(artifact.name)
    target = destination(order.repository, name, order.version, force=order.force)
    artifact = _one_version(artifact, order.version) if artifact.versions else artifact
    artifact = _configured(artifact, order, target)
    outcome = Outcome(artifact, target, artifact.config, remarks=list(artifact.remarks))
    with Staging(target, elsewhere=not order.place) as staging:
        total, done = artifact.size, 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            watcher.copied(done, total)

        if artifact.make is not None:
            watcher.doing("converting")
        staging.lay_out(artifact, advance)
        own_config = artifact.finished or target.joins
        if not own_config:
            staging.write(CONFIG_FILE, outcome.config_text())
        for note, text in order.notes.items():
            staging.write(note, text)
        if order.load:
            rehearse(order, watcher, staging, outcome, own_config=own_config)
        if order.place:
            staging.take_place()
            if confirm is not None:
                with staging.taken_back_on_error():
                    confirm()
    return outcome


def _one_version(artifact: Artifact, version: int | None) -> Artifact:
    """Return a model directory with one of its versions, if one is wanted."""
    if version is None:
        return artifact
    if version not in artifact.versions:
        has = ", ".join(map(str, artifact.versions))
        raise NotFound(f"{artifact.source} has no version {version}.\n    Its versions: {has}.")
    return dataclasses.replace(artifact, versions={version: artifact.versions[version]})


def _configured(artifact: Artifact, order: Order, target: Destination) -> Artifact:
    """Return an artifact with what was said of its configuration."""
    if order.inputs or order.outputs:
        config = declared(artifact.config, order.inputs, order.outputs)
        artifact = dataclasses.replace(artifact, config=config)
    if order.backend:
        artifact = dataclasses.replace(artifact, config=_run_by(artifact, order, target))
    if order.config is None:
        return artifact
    if target.joins:
        raise InvalidArgument(
            f"the model '{target.name}' has a {CONFIG_FILE}, which is that of all its versions.\n"
            f"    Change {target.directory / CONFIG_FILE}, or add the model under another name."
        )
    if not order.config.is_file():
        raise NotFound(f"there is no file {order.config}.\n    Name the {CONFIG_FILE} to take.")
    return dataclasses.replace(artifact, beside={**artifact.beside, CONFIG_FILE: order.config}, finished=True)


def _run_by(artifact: Artifact, order: Order, target: Destination) -> ModelConfig:
    """Return an artifact's configuration with the backend that is wanted."""
    if artifact.finished or target.joins or order.config is not None:
        raise InvalidArgument(
            f"the backend of '{target.name}' is what its {CONFIG_FILE} says.\n    Leave out --backend."
        )
    config = artifact.config
    platform = config.platform if order.backend == config.backend else ""
    return dataclasses.replace(config, backend=order.backend, platform=platform)
