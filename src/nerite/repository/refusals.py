"""Errors of failed loads and of requests during shutdown: Triton's texts, with the remedy added."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from nerite.config.loading import PolledModel
from nerite.config.mistake import Mistake, mistake_text
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotFound, Unavailable, Unsupported
from nerite.core.failures import system_error
from nerite.repository.catalogue import ModelRecord
from nerite.repository.version_state import IN_SEVERAL, ModelState, VersionState

_log = logging.getLogger("nerite.repository")
_KINDS = {
    "INVALID_ARG": "Invalid argument",
    "NOT_FOUND": "Not found",
    "INTERNAL": "Internal",
    "UNAVAILABLE": "Unavailable",
    "UNSUPPORTED": "Unsupported",
    "ALREADY_EXISTS": "Already exists",
    "CANCELLED": "Cancelled",
}
"""Error codes as Triton spells them in reasons."""


def refusal(error: Exception) -> NeriteError:
    """Convert any exception raised while loading a version into a ``NeriteError``."""
    if isinstance(error, NeriteError):
        return error.without_frames()
    return Internal(system_error(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")


def not_polled(name: str, why: str = "") -> NeriteError:
    """Log and return the error for a model whose files are missing, or cannot be used for the reason ``why``."""
    refusal = f"failed to load '{name}', failed to poll from model repository" + (f"\n    {why}" if why else "")
    _log.error("%s", refusal)
    return Internal(refusal)


def no_version_to_load(name: str, version: int, polled: PolledModel) -> NeriteError:
    """Log and return the error for a version that has no directory."""
    existing = ", ".join(map(str, polled.existing)) or "none"
    why = f"version {version} has no directory {polled.directory / str(version)} (versions there: {existing})"
    refusal = f"failed to load '{name}': {why}"
    _log.error("%s", refusal)
    return NotFound(refusal)


def no_trial_of_ensemble(name: str, version: int) -> NeriteError:
    """Return the error for a trial of an ensemble's version, all of which have the same steps."""
    return Unsupported(
        f"version {version} of ensemble '{name}' is not loaded, and would have the same steps as the other versions. "
        "Compare the models of its steps, or two ensembles."
    )


def kept_version_absent(name: str, folder: Path) -> NeriteError:
    """Log and return the error for a version that is kept for a rollout, and whose directory is gone."""
    return not_polled(
        name,
        f"version {folder.name} is kept for a rollout, and its directory {folder} does not exist. "
        "Restore the directory, or end the rollout.",
    )


def in_several(name: str, locations: Sequence[str]) -> NeriteError:
    """Log and return the error for a model that is in more than one repository."""
    where = " and ".join(locations)
    remedy = "Keep it in only one, or start the server with --model-namespacing=true."
    return not_polled(name, f"{IN_SEVERAL}: {where}. {remedy}")


def unreadable(record: ModelRecord, polled: PolledModel) -> NeriteError:
    """Log and record mistakes in a model's files, for which no load was tried; return the error of the load."""
    for line in mistake_text(polled.mistakes):
        _log.error("%s", line)
    first = polled.mistakes[0]
    if not polled.versions and first.message.startswith("at least one version"):
        record.states.setdefault(-1, VersionState(ModelState.UNAVAILABLE, first.message))
        return InvalidArgument(f"load failed for model '{record.name}': {first.message}\n    {first.remedy}")
    record.unreadable = str(first)
    return Internal(f"failed to load '{record.name}', failed to poll from model repository\n{first}")


def unfit(record: ModelRecord, mistakes: Sequence[Mistake]) -> NeriteError:
    """Log and record why an ensemble cannot be built; return the error of the load."""
    for line in mistake_text(mistakes):
        _log.error("%s", line)
    first = mistakes[0]
    if not record.running:
        record.unreadable = first.message
    return InvalidArgument(f"load failed for model '{record.name}': {first.message}\n{first.place}\n    {first.remedy}")


def no_route(record: ModelRecord, why: str) -> NeriteError:
    """Log and record why the route of a model's directory cannot be used; return the error of the load."""
    _log.error("%s", why)
    if not record.running:
        record.unreadable = why
    return InvalidArgument(f"load failed for model '{record.name}': {why}")


def failed(record: ModelRecord, failures: Mapping[int, NeriteError]) -> NeriteError:
    """Log and record why versions failed to load; return the load's error. Running versions keep their state."""
    reasons = ""
    for version, error in sorted(failures.items()):
        reason = f"{_KINDS.get(error.code, 'Unknown')}: {error.message}"
        reasons += f"version {version} is at {ModelState.UNAVAILABLE.value} state: {reason};\n"
        _log.error("failed to load '%s' version %d: %s", record.name, version, reason)
        if version not in record.running:
            record.states[version] = VersionState(ModelState.UNAVAILABLE, reason)
    return InvalidArgument(f"load failed for model '{record.name}': {reasons}")


def control_note(mode: str) -> str:
    """Explain the control mode and how to change it; return an empty text if requests load and unload models."""
    if mode in ("explicit", "demand"):
        return ""
    how = "follow the files of their repositories" if mode == "poll" else "are loaded when the server starts"
    return (
        f"Models {how} (--model-control-mode={mode}). To load and unload them by requests, start the server with "
        "--model-control-mode=explicit."
    )


def not_by_hand(mode: str) -> NeriteError:
    """Return the error for a load or unload outside mode ``explicit``; Triton's text mentions polling in any case."""
    return Unavailable(f"explicit model load / unload is not allowed if polling is enabled\n    {control_note(mode)}")


def stopping() -> NeriteError:
    """Return the error for a request to a stopping server; retryable, as another may serve it or this one restart."""
    text = "Server is stopping, scheduler for model has stopped accepting new inference requests"
    return Unavailable(text, retry_after=1)
