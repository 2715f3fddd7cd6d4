"""What is known of models before they are loaded: from their configurations and files alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from nerite.backends.interface import ModelContext
from nerite.backends.registry import GENERATING
from nerite.config.json_form import to_json
from nerite.config.loading import PolledModel, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.model_parameters import DemandMode, demand_mode_of, keep_alive_of
from nerite.config.options import RepositoryOptions
from nerite.core.errors import NeriteError
from nerite.core.failures import report, system_error
from nerite.repository.catalogue import ModelFingerprint, model_fingerprint
from nerite.repository.memory_use import files_estimate, fingerprint_digest
from nerite.repository.repositories import LocalRepository, Repository
from nerite.scheduling.residency_table import HOST, Amounts

_log = logging.getLogger("nerite.repository")
_IN_WORKERS: Final = frozenset({"python", *GENERATING})
"""Backends that always have worker processes."""


class SurveyedModel(NamedTuple):
    """A model that requests can have loaded, or that is loaded at start."""

    name: str
    namespace: str
    mode: DemandMode
    keep_alive: float
    """Seconds; 0 is no limit."""
    versions: Collection[int]
    """Those that a load would load; empty if that is not known."""
    mistake: str
    """Why it cannot be loaded, as far as its configuration shows."""
    needs: Collection[str]
    """The models of an ensemble's steps."""
    estimate: Amounts
    digest: str
    """Of its files; empty if these are not on this machine."""
    text_task: str
    """What it does if its backend has engines for language models, such as ``generate``; empty for others."""
    routed: bool
    """Its directory has a route and nothing else."""


class DemandSurvey:
    """Reads the repositories again and again; what has not changed is not read twice. Blocks."""

    def __init__(
        self,
        repositories: Sequence[Repository],
        options: RepositoryOptions,
        gpus: Sequence[int],
        task_of: Callable[[ModelContext], str],
    ) -> None:
        """``gpus`` are the numbers of the GPUs that models may use. ``task_of`` says what a model of language does."""
        self._task_of = task_of
        self._repositories = repositories
        self._options = options
        self._gpus = gpus
        self._default = DemandMode.ON_DEMAND if options.control_mode == "demand" else DemandMode.NEVER
        self._known: dict[tuple[str, str], tuple[ModelFingerprint, SurveyedModel]] = {}

    def read(self) -> dict[str, SurveyedModel]:
        """Return all models by name. A repository or model that cannot be read is logged, and stays as it was."""
        found: dict[str, SurveyedModel] = {}
        for repository in self._repositories:
            try:
                names = repository.models()
            except NeriteError as error:
                _log.error("failed to read the model repository: %s", error.message)
                found |= {
                    name: each for (place, name), (_, each) in self._known.items() if place == repository.location
                }
                continue
            for name in names:
                try:
                    each = self._one(repository, name)
                except Exception as error:  # one model must not keep the server from the others
                    report("loop", error, f"while the files of model '{name}' were read")
                    continue
                if each is not None:
                    found[name] = each
        return found

    def _one(self, repository: Repository, name: str) -> SurveyedModel | None:
        namespace = repository.location if self._options.namespacing else ""
        if not isinstance(repository, LocalRepository):  # its files are fetched when it is loaded
            return self._unseen(name, namespace)
        key = repository.location, name
        known = self._known.get(key)
        try:
            folder = repository.fetch(name)
            if folder is None:
                return None
            seen = model_fingerprint(folder)
        except (NeriteError, OSError) as error:
            why = error.message if isinstance(error, NeriteError) else system_error(error)
            _log.error("failed to read model '%s': %s", name, why)
            return known[1] if known is not None else None
        if known is not None and known[0] == seen:
            return known[1]
        polled = poll_model_directory(
            folder, name=name, config_name=self._options.config_name, auto_complete=self._options.auto_complete
        )
        config = polled.config
        worker = config.backend in _IN_WORKERS
        ensemble = config.ensemble_scheduling
        pinned = self._default is DemandMode.ON_DEMAND and {name, "*"} & {*self._options.startup_models}
        surveyed = SurveyedModel(
            name,
            namespace,
            DemandMode.PINNED if pinned else demand_mode_of(config, self._default),
            keep_alive_of(config, self._options.keep_alive_seconds),
            polled.versions,
            str(polled.mistakes[0]) if polled.mistakes else "",
            () if ensemble is None else tuple(dict.fromkeys(step.model_name for step in ensemble.step)),
            {} if ensemble else files_estimate(seen, polled.versions, self._gpus_of(config), worker=worker),
            fingerprint_digest(seen),
            self._text_task(polled) if config.backend in GENERATING else "",
            seen.route is not None and not seen.versions and seen.config is None,
        )
        self._known[key] = seen, surveyed
        return surveyed

    def _unseen(self, name: str, namespace: str) -> SurveyedModel | None:
        if self._default is DemandMode.NEVER:
            return None
        mode = DemandMode.PINNED if {name, "*"} & {*self._options.startup_models} else DemandMode.ON_DEMAND
        keep_alive = self._options.keep_alive_seconds
        return SurveyedModel(name, namespace, mode, keep_alive, (), "", (), {HOST: 0}, "", "", False)

    def _text_task(self, polled: PolledModel) -> str:
        try:
            version = max(polled.versions)
            return self._task_of(ModelContext(polled.name, version, polled.directory, to_json(polled.config)))
        except (NeriteError, ValueError):  # its load says what is wrong
            return ""

    def _gpus_of(self, config: ModelConfig) -> list[int]:
        """Return the GPUs that the instances of a model are certain to be on."""
        groups = [group for group in config.instance_group if group.kind == "KIND_GPU"]
        return sorted({number for group in groups for number in (group.gpus or self._gpus)})


def demanded(found: Mapping[str, SurveyedModel]) -> Iterator[SurveyedModel]:
    """Yield the models that are loaded on demand or pinned, and what such ensembles need."""
    chosen = [each.name for each in found.values() if each.mode is not DemandMode.NEVER and not each.routed]
    for name in chosen:  # it grows by the models that others need
        if name in found:
            chosen += [need for need in found[name].needs if need not in chosen]
            yield found[name]
