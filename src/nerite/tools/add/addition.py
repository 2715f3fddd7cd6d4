"""Adds a model: recognises, stages, tries and measures it, and moves it into place. A failure leaves nothing behind."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from nerite.artifacts.artifact import Artifact, Candidate
from nerite.artifacts.recognition import recognise
from nerite.backends import registry
from nerite.client import Client, ClientError
from nerite.config.defaults import others_with_the_file
from nerite.config.json_form import from_json, to_json
from nerite.config.loading import CONFIG_FILE
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotFound
from nerite.tools.add import proposal
from nerite.tools.add.destination import Destination, check_name, declared, destination, fit_name
from nerite.tools.add.order import AddOrder, AddOutcome, Staging, Watcher
from nerite.tools.add.proposal import (
    Contestant,
    ContestVerdict,
    Latency,
    Throughput,
    TrialServer,
    contest_verdict,
    propose,
)
from nerite.tools.bench.requests import Request, Shapes, made_up_data

_ELSEWHERE: Final = "Pass --no-load to add it anyway, for a server that has what it needs."
_REMEDIES: Final = (
    ("unable to find backend", _ELSEWHERE),
    ("which is not installed", _ELSEWHERE),
    ("ModuleNotFoundError", _ELSEWHERE),
    ("unsupported gpu id", _ELSEWHERE),
    ("no GPUs are available", _ELSEWHERE),
    ("supports only GPU device", _ELSEWHERE),
    ("needs its inputs and outputs", "Declare them with --input x:FP32:-1,4 and --output …, or with --config FILE."),
)
"""Remedies for the errors of a load, by a part of the error's text."""


def load_model(trial: TrialServer, client: Client, outcome: AddOutcome, config: ModelConfig | None) -> None:
    """Load the staged model on the trial server, if given with another configuration. Raises ``NeriteError``."""
    try:
        client.load(outcome.destination.name, config=None if config is None else to_json(config))
    except ClientError as error:
        reason = f"the server exited while loading it:\n{trial.last_words}" if trial.ended else str(error)
        # The staging directory would mean nothing to the user.
        reason = reason.replace(str(trial.repository), str(outcome.destination.repository))
        remedies = "".join(f"\n    {remedy}" for sign, remedy in _REMEDIES if sign in reason)
        raise Internal(f"{outcome.artifact.source} cannot be served: {_indented(reason)}{remedies}") from None


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n    ")


_COUNTS: Final = (1, 2, 2, 1)
"""Numbers of instances to compare, in an order that gives no number an advantage if the machine's load changes."""


class Examination:
    """Measures a loaded model with random data, with other backends and several instances, and proposes settings."""

    def __init__(
        self, order: AddOrder, watcher: Watcher, trial: TrialServer, client: Client, outcome: AddOutcome
    ) -> None:
        """Results are stored in ``outcome``, which must already have the signature."""
        assert outcome.signature is not None
        self._order = order
        self._watcher = watcher
        self._trial = trial
        self._client = client
        self._outcome = outcome
        self._model = outcome.signature

    def run(self, config: ModelConfig, rivals: Sequence[str]) -> None:
        """Measure the model with its own backend and with its ``rivals``, and propose settings."""
        outcome = self._outcome
        if obstacle := _obstacle(config):
            outcome.remarks.append(f"Not measured: {obstacle}.")
            return
        needed = [tensor.name for tensor in config.input if not tensor.optional]
        try:
            inputs = self._inputs(needed, min(config.max_batch_size, 1))
            config, measured, contest = self._contest(config, rivals, needed, inputs)
            throughputs = [self._throughput(config, count, inputs) for count in _counts(config)]
        except (ClientError, NeriteError) as error:
            outcome.remarks.append(f"Not measured, because it fails with random data: {_first_line(error)}")
            return
        outcome.remarks += self._sizes_taken(needed, batching=config.max_batch_size > 0)
        outcome.throughputs = proposal.best_of_each(throughputs)
        outcome.proposal = propose(config, measured, outcome.throughputs, contest)

    def _contest(
        self, config: ModelConfig, rivals: Sequence[str], needed: Sequence[str], inputs: Request
    ) -> tuple[ModelConfig, Sequence[Latency], ContestVerdict | None]:
        """Measure each backend; return the configuration and the latencies of the best one, and the verdict."""
        outcome, largest = self._outcome, config.max_batch_size
        loaded = self._trial.memory()
        if largest:
            self._load(config)
        own = self._contestant(config.backend, largest, needed, inputs, alone=not rivals)
        outcome.latencies = list(own.latencies)
        outcome.memory_at_work = max(0, self._trial.memory() - loaded)
        configs = {config.backend: config}
        for backend in rivals:
            try:
                # The backend completes its own platform and default number of instances.
                self._load(dataclasses.replace(config, backend=backend, platform="", instance_group=()))
                outcome.rivals.append(self._contestant(backend, largest, needed, inputs))
                configs[backend] = from_json(self._client.config(self._model.name))
            except (ClientError, NeriteError):
                outcome.remarks.append(
                    f"{backend} can also read this kind of file, but not this one with these inputs and outputs."
                )
        if not outcome.rivals:
            return config, own.latencies, None
        found = contest_verdict(own, outcome.rivals)
        return configs[found.winner.backend], found.winner.latencies, found

    def _contestant(
        self, backend: str, largest: int, needed: Sequence[str], inputs: Request, *, alone: bool = False
    ) -> Contestant:
        def report(what: str) -> None:
            self._watcher.doing(what if alone else f"{what} with {backend}")

        measured = proposal.latencies(self._client, self._model, largest, partial(self._inputs, needed), report)
        return Contestant(backend, measured, self._client.infer(self._model.name, inputs))

    def _throughput(self, config: ModelConfig, count: int, inputs: Request) -> Throughput:
        self._watcher.doing(f"measuring {count} instance{'s' if count > 1 else ''}")
        groups = tuple(dataclasses.replace(group, count=count) for group in config.instance_group[:1])
        self._load(dataclasses.replace(config, instance_group=groups))
        return proposal.throughput(self._client, self._trial.url, self._model, inputs, count)

    def _inputs(self, needed: Sequence[str], batch: int) -> Request:
        wanted = [tensor for tensor in self._model.inputs if tensor.name in needed]
        return made_up_data(wanted, Shapes(batch, self._order.shapes))

    def _load(self, config: ModelConfig) -> None:
        load_model(self._trial, self._client, self._outcome, config)

    def _sizes_taken(self, needed: Sequence[str], *, batching: bool) -> list[str]:
        """Return a remark about inputs whose variable dimensions were measured with size 1 by default, if any."""
        free = [
            tensor.name
            for tensor in self._model.inputs
            if tensor.name in needed and tensor.name not in self._order.shapes and -1 in tensor.shape[batching:]
        ]
        if not free:
            return []
        return [
            f"Variable dimensions of {', '.join(free)} were measured with size 1. To measure others, pass for example "
            f"--shape {free[0]}=128."
        ]


def rivals_of(config: ModelConfig) -> list[str]:
    """Return the other installed backends that can read the model's file; none for a model on GPUs."""
    if any(group.kind == "KIND_GPU" for group in config.instance_group):
        return []
    return [backend for backend in others_with_the_file(config) if registry.is_installed(backend)]


def _counts(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of instances to compare; none for a model on GPUs."""
    return () if any(group.kind == "KIND_GPU" for group in config.instance_group) else _COUNTS


def _obstacle(config: ModelConfig) -> str:
    """Return the reason why a model cannot be measured on its own with random requests, or "" if it can."""
    if config.model_transaction_policy is not None and config.model_transaction_policy.decoupled:
        return "it is decoupled"
    if config.sequence_batching is not None:
        return "its requests belong to sequences"
    if config.ensemble_scheduling is not None:
        return "it is an ensemble of other models"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


_COMPLETED: Final = (
    "max_batch_size", "input", "output", "dynamic_batching", "sequence_batching", "model_transaction_policy",
)  # fmt: skip
"""Settings that are completed from the model and written to its configuration."""


def rehearse_model(
    order: AddOrder, watcher: Watcher, staging: Staging, outcome: AddOutcome, *, own_config: bool
) -> None:
    """Load a staged model in a trial server, complete its configuration, and measure it.

    Raises ``NeriteError`` if it cannot be loaded. ``own_config``: the user wrote the configuration, so it is kept.
    """
    name = outcome.destination.name
    watcher.doing("starting a trial server")
    with TrialServer(staging.repository) as trial, trial.client as client:
        before = trial.memory()
        watcher.doing("loading")
        began = time.monotonic()
        load_model(trial, client, outcome, None)
        outcome.load_seconds = time.monotonic() - began
        outcome.memory = max(0, trial.memory() - before)
        outcome.signature = client.model(name)
        complete = from_json(client.config(name))
        if not (complete.input or complete.output):
            raise Internal(
                f"{outcome.artifact.source} cannot be served: its configuration has neither inputs nor outputs.\n"
                "    Implement auto_complete_config in the model, or specify a config.pbtxt with --config."
            )
        if own_config:
            outcome.config = complete
        else:
            found = {each: getattr(complete, each) for each in _COMPLETED}
            outcome.config = dataclasses.replace(outcome.artifact.config, **found)
        if order.measure:
            may_grow = not own_config and complete.backend != "python"
            largest = max(complete.max_batch_size, order.largest_batch) if may_grow else complete.max_batch_size
            grown = dataclasses.replace(complete, max_batch_size=largest if complete.max_batch_size else 0)
            rivals = [] if own_config or order.backend else rivals_of(complete)
            Examination(order, watcher, trial, client, outcome).run(grown, rivals)
        if outcome.proposal is not None and outcome.proposal.advice and not own_config:
            outcome.accepted = watcher.accepts(outcome)
            if outcome.accepted:
                outcome.config = outcome.proposal.applied(outcome.config)
        if not own_config:
            staging.write(CONFIG_FILE, outcome.config_text())
            if outcome.accepted:
                watcher.doing("loading it with the final configuration")
                load_model(trial, client, outcome, None)


def add_model(order: AddOrder, watcher: Watcher, confirm: Callable[[], None] | None = None) -> AddOutcome:
    """Add a model to a repository. Raises ``NeriteError``, and then nothing has changed.

    ``confirm`` is called when the model is in place; if it raises, the addition is undone.
    """
    artifact = recognise(
        Candidate(order.source, class_place=order.class_place, flavor=order.flavor, trusted=order.trusted)
    )
    name = check_name(order.name) if order.name else fit_name(artifact.name)
    target = destination(order.repository, name, order.version, force=order.force)
    artifact = _one_version(artifact, order.version) if artifact.versions else artifact
    artifact = _configured(artifact, order, target)
    outcome = AddOutcome(artifact, target, artifact.config, remarks=list(artifact.remarks), source=order.origin)
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
            rehearse_model(order, watcher, staging, outcome, own_config=own_config)
        if order.place:
            staging.take_place()
            if confirm is not None:
                with staging.taken_back_on_error():
                    confirm()
    return outcome


def _one_version(artifact: Artifact, version: int | None) -> Artifact:
    """Return the artifact of a model directory reduced to the given version, if any."""
    if version is None:
        return artifact
    if version not in artifact.versions:
        has = ", ".join(map(str, artifact.versions))
        raise NotFound(f"{artifact.source} has no version {version}.\n    Its versions: {has}.")
    return dataclasses.replace(artifact, versions={version: artifact.versions[version]})


def _configured(artifact: Artifact, order: AddOrder, target: Destination) -> Artifact:
    """Return an artifact with the configuration settings of the order."""
    if order.inputs or order.outputs:
        config = declared(artifact.config, order.inputs, order.outputs)
        artifact = dataclasses.replace(artifact, config=config)
    if order.backend:
        artifact = dataclasses.replace(artifact, config=_run_by(artifact, order, target))
    if order.config is None:
        return artifact
    if target.joins:
        raise InvalidArgument(
            f"the model '{target.name}' already has a {CONFIG_FILE}, which all its versions share.\n"
            f"    Change {target.directory / CONFIG_FILE}, or add the model under another name."
        )
    if not order.config.is_file():
        raise NotFound(f"{order.config} does not exist or is not a file.\n    Specify an existing {CONFIG_FILE}.")
    return dataclasses.replace(artifact, beside={**artifact.beside, CONFIG_FILE: order.config}, finished=True)


def _run_by(artifact: Artifact, order: AddOrder, target: Destination) -> ModelConfig:
    """Return an artifact's configuration with the requested backend."""
    if artifact.finished or target.joins or order.config is not None:
        raise InvalidArgument(
            f"the backend of '{target.name}' is determined by its {CONFIG_FILE}.\n    Omit --backend."
        )
    config = artifact.config
    platform = config.platform if order.backend == config.backend else ""
    return dataclasses.replace(config, backend=order.backend, platform=platform)
