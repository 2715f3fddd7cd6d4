"""What is traced: settings of the server, and of single models over them.

There are three layers: how the server was started, what clients set since for all models, and what they set for one
model. A setting that a layer does not have comes from the layer below. An update changes all that it names, or nothing.

A layer in which something is set has a ``Sampler`` of its own: its rate and its count are for its requests alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from nerite.config.options import OpenTelemetryOptions, TraceOptions
from nerite.core.errors import InvalidArgument

LEVELS: Final = ("TIMESTAMPS", "TENSORS")
Update: TypeAlias = Mapping[str, Any]
"""Fields of ``TraceValues`` by name; None has the layer below decide again."""


@dataclass(frozen=True)
class TraceValues:
    """A value of every setting that can be changed."""

    levels: frozenset[str]
    """Of ``LEVELS``; empty is off."""
    rate: int
    count: int
    """Traces that are still to be made, -1 for any number."""
    log_frequency: int


class Sampler:
    """Chooses which requests of a layer are traced."""

    __slots__ = ("_until_next", "open", "tensors", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        """With what is left of ``count``."""
        self.tensors = "TENSORS" in values.levels
        """Whether traces have tensors."""
        self.open = 0
        """Traces that are not complete yet. The business of whoever makes them."""
        self._until_next = values.rate if values.levels and values.count else 0
        """Requests up to the next that is traced, with it. From 0 on downwards there is none."""

    def choose(self) -> bool:
        """Say of one more request whether it is traced: every ``rate``-th is, until ``count`` of them were."""
        self._until_next -= 1
        if self._until_next:
            return False
        values = self.values
        self._until_next = values.rate
        if values.count > 0:
            self.values = replace(values, count=values.count - 1)
            if values.count == 1:
                self._until_next = 0
        return True


class TraceSettings:
    """The settings, told and changed. Models are names here, loaded or not."""

    def __init__(self, options: TraceOptions, changed: Callable[[], None]) -> None:
        """``changed`` is called after each update."""
        self._options = options
        self._changed = changed
        self._start = TraceValues(frozenset(options.levels), options.rate, options.count, options.log_frequency)
        self._server = Sampler(self._start)
        self._models: dict[str, Sampler] = {}
        self._set: dict[str, Update] = {}
        """What clients set, by model; the empty name is for all models."""

    @property
    def levels(self) -> frozenset[str]:
        """The levels that lead to something: spans have times alone, and records have to have a file."""
        if self._options.mode == "opentelemetry":
            return frozenset(("TIMESTAMPS",))
        return frozenset(LEVELS if self._options.file else ())

    def sampler(self, model: str) -> Sampler:
        """Return what chooses from the requests of a model; an empty name is that of none."""
        return self._models.get(model, self._server)

    def told(self, model: str) -> list[tuple[str, str | Sequence[str]]]:
        """Return all settings of a model, or of the server if ``model`` is empty, as the trace extension names them.

        All values are text; the levels are a list. ``resource`` comes as often as there are attributes.
        """
        values, options = self.sampler(model).values, self._options
        told: list[tuple[str, str | Sequence[str]]] = [
            ("trace_level", [level for level in LEVELS if level in values.levels] or ["OFF"]),
            ("trace_rate", str(values.rate)),
            ("trace_count", str(values.count)),
        ]
        if options.mode == "opentelemetry":
            return [*told, ("trace_mode", options.mode), *_exporter(options.opentelemetry)]
        told += [("log_frequency", str(values.log_frequency)), ("trace_file", options.file)]
        return [*told, ("trace_mode", options.mode)]

    def update(self, model: str, update: Update) -> None:
        """Change settings of a model, or of the server if ``model`` is empty. Raises Triton's refusals."""
        settings = {name: self._remaining(name) for name in self._set}
        merged = {**settings.get(model, {}), **update}
        settings[model] = {name: value for name, value in merged.items() if value is not None}
        if model:
            server, changed = self._server, [model]
        else:
            server = Sampler(replace(self._start, **settings[""]))
            self._check(server.values)
            changed = list(self._models)
        models = dict(self._models)
        for name in changed:
            if not settings[name]:
                models.pop(name, None)
                continue
            models[name] = Sampler(replace(server.values, **settings[name]))
            # A count that a model has used up does not keep the settings of the server from being changed.
            self._check(models[name].values, used_up=not model and "count" in settings[name])
        self._server, self._models = server, models
        self._set = {name: values for name, values in settings.items() if values}
        self._changed()

    def _remaining(self, model: str) -> Update:
        """Return what clients set for a model, with what is left of a count."""
        update = self._set[model]
        return {**update, "count": self.sampler(model).values.count} if "count" in update else update

    def _check(self, values: TraceValues, *, used_up: bool = False) -> None:
        """Refuse settings with which nothing could be traced although they ask for it.

        ``used_up``: a count of 0 may be what is left of one.
        """
        if not values.levels:
            return
        reason = None
        if not values.rate:
            reason = "sample rate must be non-zero"
        elif self._options.mode == "triton" and not self._options.file:
            reason = "trace file name is not given"
        elif not values.count and not used_up:
            reason = ""
        if reason is not None:
            raise InvalidArgument(f"Attempting to set invalid trace setting :{reason}")


def _exporter(options: OpenTelemetryOptions) -> list[tuple[str, str]]:
    """Return the settings of the exporter: those that were given, and the sizes of its batches always."""
    usual = OpenTelemetryOptions()
    told = [("resource", f"{k}={v}") for k, v in options.resource.items() if usual.resource.get(k) != v]
    if options.url != usual.url:
        told.append(("url", options.url))
    sizes = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")
    return [*told, *((name, str(getattr(options, name))) for name in sizes)]
