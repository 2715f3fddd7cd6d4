"""An ensemble as its files say it, and whether the models are there that it is put together from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nerite.config.mistake import Mistake, Source
from nerite.config.model_config import ModelConfig, ModelTransactionPolicy
from nerite.config.scheduling_choice import EnsembleStep
from nerite.config.validate_wiring import check_wiring
from nerite.core.signature import Signature
from nerite.execution.running_version import RunningVersion
from nerite.repository.catalogue import Catalogue
from nerite.repository.model_record import ModelRecord, State


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

    def finished(self, parts: Sequence[RunningVersion]) -> tuple[ModelConfig, Signature]:
        """Return what follows from the models: whether there are several responses, and the names of classes."""
        labels = {
            tensor: part.signature.outputs[name].labels
            for step, part in zip(reversed(self.steps), reversed(parts), strict=True)
            for name, tensor in step.output_map.items()
        }
        own = self.signature
        outputs = [
            output._replace(labels=output.labels or labels.get(output.name, ())) for output in own.outputs.values()
        ]
        policy = ModelTransactionPolicy(decoupled=any(part.decoupled for part in parts))
        config = replace(self.config, model_transaction_policy=policy)
        return config, Signature(own.model_name, own.max_batch_size, list(own.inputs.values()), outputs)


def find_parts(assembly: Assembly, namespace: str, catalogue: Catalogue) -> tuple[list[RunningVersion], list[Mistake]]:
    """Return the models of the steps as they run now, and what is wrong: with one of them, or between them."""
    parts, mistakes = _find(assembly, namespace, catalogue)
    return parts, assembly.source.place(mistakes)


def _find(assembly: Assembly, namespace: str, catalogue: Catalogue) -> tuple[list[RunningVersion], list[Mistake]]:
    records = [catalogue.part(namespace, step.model_namespace, step.model_name) for step in assembly.steps]
    missing = [
        (index, step.model_name)
        for index, (step, record) in enumerate(zip(assembly.steps, records, strict=True))
        if record is None or record.going or not _told_of(record)
    ]
    name = assembly.config.name
    if missing:
        names = ", ".join(dict.fromkeys(model for _, model in missing))
        mistake = Mistake(
            message=f"ensemble {name} contains models that are not available or ambiguous: {names}",
            path=_path(missing[0][0]),
            remedy="Put the model into the repository and load it, or correct the name.",
        )
        return [], [mistake]
    parts: list[RunningVersion] = []
    mistakes: list[Mistake] = []
    for index, (step, record) in enumerate(zip(assembly.steps, records, strict=True)):
        assert record is not None
        running = record.running.get(record.latest if step.model_version < 0 else step.model_version)
        if running is None:
            mistakes.append(_absent(name, step, record, index))
        else:
            parts.append(running)
    if not mistakes:
        mistakes += check_wiring(assembly.config, [part.config for part in parts])
    return parts, mistakes


def _told_of(record: ModelRecord) -> bool:
    """Return whether there is something to tell of a model: it runs, or could not be loaded."""
    if record.running or record.assembly is not None:
        return True
    return any(state.reason not in ("", "unloaded") for state in record.states.values())


def _absent(ensemble: str, step: EnsembleStep, record: ModelRecord, index: int) -> Mistake:
    start = f"ensemble '{ensemble}' depends on '{record.name}'"
    if record.running:
        there = ", ".join(map(str, sorted(record.running)))
        return Mistake(
            message=f"{start} whose required version {step.model_version} is not loaded.",
            path=(*_path(index), "model_version"),
            remedy=f"Write model_version: -1 for the latest version, or one that is loaded: {there}.",
        )
    if record.assembly is not None:
        message = f"{start} which is not valid. Model '{record.name}' failed with error: {record.unreadable}"
    else:
        reasons = "\n".join(_failures(record))
        message = f"{start} which has no loaded version. Model '{record.name}' loading failed with error: {reasons}"
    return Mistake(message=message, path=(*_path(index), "model_name"), remedy=f"Make '{record.name}' load first.")


def _failures(record: ModelRecord) -> Iterator[str]:
    for version, state in sorted(record.states.items()):
        if state.state is State.UNAVAILABLE:
            yield f"version {version} is at {state.state.value} state: {state.reason};"


def _path(step: int) -> tuple[str | int, ...]:
    return ("ensemble_scheduling", "step", step)
