"""A configuration is tried: a server with the model alone, loaded with it, under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nerite.analyze.finding import Figure, Finding
from nerite.analyze.settings import Value
from nerite.bench.fleet import Fleet
from nerite.bench.measurement import Rule
from nerite.bench.plan import Level
from nerite.bench.preparation import Target, Wanted, prepared
from nerite.bench.session import Look, Outcome, Session
from nerite.client import ClientError
from nerite.client.address import Address
from nerite.config.json_form import from_json, to_json
from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument
from nerite.intake.trial import Trial


@dataclass(frozen=True)
class Load:
    """What is asked of each configuration, and for how long."""

    wanted: Wanted
    concurrencies: tuple[int, ...]
    rule: Rule
    warm_up: float

    def to_json(self) -> dict[str, Any]:
        """Return all that figures depend on."""
        wanted, rule = self.wanted, self.rule
        return {
            "model": wanted.model,
            "batch": wanted.batch,
            "shapes": {name: list(sizes) for name, sizes in wanted.shapes.items()},
            "data": str(wanted.data),
            "concurrencies": list(self.concurrencies),
            "warm_up": self.warm_up,
            "window": rule.seconds,
            "windows": rule.most,
            "stability": rule.percentage,
        }


def completed(repository: Path, model: str) -> ModelConfig:
    """Return the whole configuration of a model as it is now. Raises ``NeriteError`` if it cannot be loaded."""
    with _loaded(repository, model, None) as (trial, _):
        return from_json(trial.client.config(model))


def measured(
    repository: Path, config: ModelConfig, changes: Mapping[str, Value], load: Load, tell: Callable[[Look], None]
) -> Finding:
    """Serve a model with ``config``, and return what loads on it showed."""
    try:
        with _loaded(repository, load.wanted.model, config) as (trial, before):
            target = Target("http", Address.parse(trial.url))
            plan = prepared(load.wanted, target, trial.client)
            levels = [Level(concurrency=concurrency) for concurrency in load.concurrencies]
            with Fleet(plan) as fleet:
                outcomes = list(Session(fleet, load.rule, load.warm_up).run(levels, tell))
            figures = tuple(map(_figure, outcomes))
            return Finding(changes, figures, max(0, trial.memory() - before))
    except (ClientError, InvalidArgument) as error:
        return Finding(changes, refused=str(error))


@contextmanager
def _loaded(repository: Path, model: str, config: ModelConfig | None) -> Iterator[tuple[Trial, int]]:
    """Yield a server that has the model, and the bytes that it took without it."""
    with Trial(repository) as trial, trial.client as client:
        before = trial.memory()
        try:
            client.load(model, config=None if config is None else to_json(config))
        except ClientError as error:
            reason = f"the server ended while it was loaded:\n{trial.last_words}" if trial.ended else str(error)
            raise InvalidArgument(f"'{model}' cannot be loaded: {reason}") from None
        yield trial, before


def _figure(outcome: Outcome) -> Figure:
    found = outcome.figures
    return Figure(outcome.level.concurrency, found.rate, found.latency.mean, found.latency["p99"], found.failed)
