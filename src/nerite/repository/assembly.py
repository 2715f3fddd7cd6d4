"""An ensemble as its files say it, and whether the models are there that it is put together from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nerite.config.mistake import Mistake, Source
from nerite.config.model_config import ModelConfig, ModelTransactionPolicy
from nerite.config.scheduling_choice import EnsembleStep
from nerite.config.validate_parts import Candidate, find_parts
from nerite.core.signature import Signature
from nerite.execution.running_version import RunningVersion
from nerite.repository.catalogue import Catalogue
from nerite.repository.model_record import ModelRecord, State


class Target(NamedTuple):
    """What a step goes to."""

    namespace: str
    running: RunningVersion


@dataclass(frozen=True)
class Assembly:
    """What is known of an ensemble before its models are."""

    config: ModelConfig
    signature: Signature
    """With the labels that the ensemble has itself."""
    versions: tuple[int, ...]
    source: Source
    """Where it is written."""

    @property
    def models(self) -> Sequence[str]:
        """The names of the models to ask."""
        return tuple(dict.fromkeys(step.model_name for step in self.steps))

    @property
    def steps(self) -> Sequence[EnsembleStep]:
        """The models to ask, and how they are connected."""
        assert self.config.ensemble_scheduling is not None
        return self.config.ensemble_scheduling.step

    def finished(self, targets: Sequence[Target]) -> tuple[ModelConfig, Signature]:
        """Return what follows from the models.

        That is where they are, whether there are several responses, and the names of classes.
        """
        labels = {
            tensor: target.running.signature.outputs[name].labels
            for step, target in zip(reversed(self.steps), reversed(targets), strict=True)
            for name, tensor in step.output_map.items()
        }
        own = self.signature
        outputs = [
            output._replace(labels=output.labels or labels.get(output.name, ())) for output in own.outputs.values()
        ]
        policy = ModelTransactionPolicy(decoupled=any(target.running.decoupled for target in targets))
        assert self.config.ensemble_scheduling is not None
        steps = tuple(
            replace(step, model_namespace=target.namespace) for step, target in zip(self.steps, targets, strict=True)
        )
        scheduling = replace(self.config.ensemble_scheduling, step=steps)
        config = replace(self.config, model_transaction_policy=policy, ensemble_scheduling=scheduling)
        return config, Signature(own.model_name, own.max_batch_size, list(own.inputs.values()), outputs)


def find_targets(assembly: Assembly, namespace: str, catalogue: Catalogue) -> tuple[list[Target], list[Mistake]]:
    """Return the models of the steps as they run now, and what is wrong: with one of them, or between them."""
    targets, mistakes = _find(assembly, namespace, catalogue)
    return targets, assembly.source.place(mistakes)


def _find(assembly: Assembly, namespace: str, catalogue: Catalogue) -> tuple[list[Target], list[Mistake]]:
    records = [catalogue.part(namespace, step.model_namespace, step.model_name) for step in assembly.steps]
    candidates = [None if record is None else _candidate(record) for record in records]
    _, mistakes = find_parts(assembly.config, candidates)
    targets: list[Target] = []
    for step, record, candidate in zip(assembly.steps, records, candidates, strict=True):
        version = None if candidate is None else candidate.version(step)
        if record is not None and version is not None:
            targets.append(Target(record.namespace, record.running[version]))
    return targets, mistakes


def _candidate(record: ModelRecord) -> Candidate | None:
    """Return what a step may go to; None if there is nothing to tell of the model, never tried or about to go."""
    if record.going:
        return None
    name = record.name
    if record.running:
        return Candidate(name, {version: each.config for version, each in record.running.items()}, record.latest)
    if record.assembly is not None:
        failure = f"which is not valid. Model '{name}' failed with error: {record.unreadable}"
        return Candidate(name, {}, failure=failure)
    if all(state.reason in ("", "unloaded") for state in record.states.values()):
        return None
    reasons = "\n".join(_failures(record))
    return Candidate(
        name, {}, failure=f"which has no loaded version. Model '{name}' loading failed with error: {reasons}"
    )


def _failures(record: ModelRecord) -> Iterator[str]:
    for version, state in sorted(record.states.items()):
        if state.state is State.UNAVAILABLE:
            yield f"version {version} is at {state.state.value} state: {state.reason};"
