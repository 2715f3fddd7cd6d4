"""A configuration is tried: a server with these models alone, loaded with it, under load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nerite.analyze.finding import Figure, Finding
from nerite.analyze.load import Load
from nerite.analyze.settings import Value
from nerite.analyze.staged import staged
from nerite.bench.fleet import Fleet
from nerite.bench.plan import Level
from nerite.bench.preparation import Target, prepared
from nerite.bench.session import Look, Outcome, Session, together
from nerite.client import ClientError
from nerite.client.address import Address
from nerite.config.json_form import from_json
from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument
from nerite.intake.trial import Trial


def completed(repository: Path, models: Sequence[str]) -> dict[str, ModelConfig]:
    """Return the whole configurations of models as they are now, and of those that ensembles among them are made of.

    Raises ``NeriteError`` if one cannot be loaded.
    """
    found: dict[str, ModelConfig] = {}
    with _loaded(repository, models) as (trial, _):
        names = list(models)
        for name in names:
            found[name] = config = from_json(trial.client.config(name))
            steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
            names += [step.model_name for step in steps if step.model_name not in names]
    return found


def measured(
    repository: Path,
    texts: Mapping[str, str],
    changes: Mapping[str, Value],
    load: Load,
    levels: Sequence[int],
    tell: Callable[[Look], None],
) -> Finding:
    """Serve models with these texts of config.pbtxt, and return what loads of these levels on them showed."""
    try:
        with staged(repository, texts) as place:
            try:
                figures, memory = _figures(place, load, levels, tell)
            except (ClientError, InvalidArgument) as error:
                return Finding(changes, refused=str(error).replace(str(place), str(repository)))
    except OSError as error:
        return Finding(changes, refused=f"{error.filename}: {error.strerror}")
    return Finding(changes, figures, memory)


def _figures(
    repository: Path, load: Load, levels: Sequence[int], tell: Callable[[Look], None]
) -> tuple[tuple[Figure, ...], int]:
    with _loaded(repository, load.models, grpc=load.protocol == "grpc") as (trial, before), ExitStack() as stack:
        target = Target(load.protocol, Address.parse(trial.grpc_url if load.protocol == "grpc" else trial.url))
        sessions = {}
        for wanted in load.asked:
            fleet = stack.enter_context(Fleet(prepared(wanted, target, trial.client)))
            sessions[wanted.model] = Session(fleet, load.rule, load.warm_up)
        figures = []
        for level in levels:
            outcomes = together(list(sessions.values()), Level(concurrency=level), tell)
            shown = map(_figure, outcomes)
            figures.append(Figure.of_several(dict(zip(sessions, shown, strict=True))))
        return tuple(figures), max(0, trial.memory() - before)


@contextmanager
def _loaded(repository: Path, models: Sequence[str], *, grpc: bool = False) -> Iterator[tuple[Trial, int]]:
    """Yield a server that has the models, and the bytes that it took without them."""
    with Trial(repository, grpc=grpc) as trial, trial.client as client:
        before = trial.memory()
        for model in models:
            try:
                client.load(model)
            except ClientError as error:
                reason = f"the server ended while it was loaded:\n{trial.last_words}" if trial.ended else str(error)
                raise InvalidArgument(f"'{model}' cannot be loaded: {reason}") from None
        yield trial, before


def _figure(outcome: Outcome) -> Figure:
    found = outcome.figures
    return Figure(outcome.level.concurrency, found.rate, found.latency.mean, found.latency["p99"], found.failed)
