"""A model that was loaded is measured, with other backends and with more instances, too; a proposal is made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from nerite.backends import registry
from nerite.client import Client, ClientError
from nerite.config.backend_choice import others_with_the_file
from nerite.config.json_form import from_json
from nerite.config.model_config import ModelConfig
from nerite.core.errors import NeriteError
from nerite.core.tensor import Array
from nerite.intake import measurement
from nerite.intake.contest import Contestant, Verdict, verdict
from nerite.intake.loading import load
from nerite.intake.measurement import Latency, Throughput
from nerite.intake.order import Order, Watcher
from nerite.intake.outcome import Outcome
from nerite.intake.proposal import propose
from nerite.intake.trial import Trial

_COUNTS: Final = (1, 2, 2, 1)
"""Numbers of instances that are compared, in an order that lets no number have the better moment."""


class Examination:
    """What can be found out about a model with random data, in a server that has it loaded."""

    def __init__(self, order: Order, watcher: Watcher, trial: Trial, client: Client, outcome: Outcome) -> None:
        """The findings go to ``outcome``, which has the signature already."""
        assert outcome.signature is not None
        self._order = order
        self._watcher = watcher
        self._trial = trial
        self._client = client
        self._outcome = outcome
        self._model = outcome.signature

    def run(self, config: ModelConfig, rivals: Sequence[str]) -> None:
        """Measure the model as ``config`` has it, and by the backends that are its rivals; make a proposal."""
        outcome = self._outcome
        if obstacle := _obstacle(config):
            outcome.remarks.append(f"It was not measured: {obstacle}.")
            return
        needed = [tensor.name for tensor in config.input if not tensor.optional]
        try:
            inputs = self._inputs(needed, min(config.max_batch_size, 1))
            config, measured, contest = self._contest(config, rivals, needed, inputs)
            throughputs = [self._throughput(config, count, inputs) for count in _counts(config)]
        except (ClientError, NeriteError) as error:
            outcome.remarks.append(f"It does not take random data, and was not measured: {_first_line(error)}")
            return
        outcome.remarks += self._sizes_taken(needed, batching=config.max_batch_size > 0)
        outcome.throughputs = measurement.best_of_each(throughputs)
        outcome.proposal = propose(config, measured, outcome.throughputs, contest)

    def _contest(
        self, config: ModelConfig, rivals: Sequence[str], needed: Sequence[str], inputs: Mapping[str, Array]
    ) -> tuple[ModelConfig, Sequence[Latency], Verdict | None]:
        """Measure each backend; return the configuration and the latencies of the best, and why it is."""
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
                # It fills in its own platform, and as many instances as it has by default.
                self._load(dataclasses.replace(config, backend=backend, platform="", instance_group=()))
                outcome.rivals.append(self._contestant(backend, largest, needed, inputs))
                configs[backend] = from_json(self._client.config(self._model.name))
            except (ClientError, NeriteError):
                outcome.remarks.append(
                    f"{backend} reads such files, too, but not this one with these inputs and outputs."
                )
        if not outcome.rivals:
            return config, own.latencies, None
        found = verdict(own, outcome.rivals)
        return configs[found.winner.backend], found.winner.latencies, found

    def _contestant(
        self, backend: str, largest: int, needed: Sequence[str], inputs: Mapping[str, Array], *, alone: bool = False
    ) -> Contestant:
        def tell(what: str) -> None:
            self._watcher.doing(what if alone else f"{what} by {backend}")

        measured = measurement.latencies(self._client, self._model, needed, largest, self._order.shapes, tell)
        return Contestant(backend, measured, self._client.infer(self._model.name, inputs))

    def _throughput(self, config: ModelConfig, count: int, inputs: Mapping[str, Array]) -> Throughput:
        self._watcher.doing(f"measuring {count} instance{'s' if count > 1 else ''}")
        groups = tuple(dataclasses.replace(group, count=count) for group in config.instance_group[:1])
        self._load(dataclasses.replace(config, instance_group=groups))
        return measurement.throughput(self._client, self._trial.url, self._model, inputs, count)

    def _inputs(self, needed: Sequence[str], batch: int) -> dict[str, Array]:
        return measurement.inputs_of(self._model, needed, batch, self._order.shapes)

    def _load(self, config: ModelConfig) -> None:
        load(self._trial, self._client, self._outcome, config)

    def _sizes_taken(self, needed: Sequence[str], *, batching: bool) -> list[str]:
        """Return what is to be known of inputs with free sizes that were measured with 1, as nobody named others."""
        free = [
            tensor.name
            for tensor in self._model.inputs
            if tensor.name in needed and tensor.name not in self._order.shapes and -1 in tensor.shape[batching:]
        ]
        if not free:
            return []
        return [f"Free sizes of {', '.join(free)} were 1 in this; --shape {free[0]}=128, say, measures others."]


def rivals_of(config: ModelConfig) -> list[str]:
    """Return the other backends here that read the model's file; none where a GPU decides."""
    if any(group.kind == "KIND_GPU" for group in config.instance_group):
        return []
    return [backend for backend in others_with_the_file(config) if registry.is_installed(backend)]


def _counts(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of instances to compare: none where it is not for processors to say."""
    return () if any(group.kind == "KIND_GPU" for group in config.instance_group) else _COUNTS


def _obstacle(config: ModelConfig) -> str:
    """Return why a model cannot be measured by itself, with requests of random data; empty if it can."""
    if config.model_transaction_policy is not None and config.model_transaction_policy.decoupled:
        return "it has any number of responses to a request"
    if config.sequence_batching is not None:
        return "its requests are those of sequences"
    if config.ensemble_scheduling is not None:
        return "it is made of other models"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
