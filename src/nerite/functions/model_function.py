"""``@nerite.model``: a function, or a class whose objects are called, that can be served as a model."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast, overload

from nerite.core.text import MAX_NAME
from nerite.functions.annotations import FunctionMistake
from nerite.functions.signature import FunctionSignature, FunctionTensor, read_signature

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MAX_SEQUENCES: Final = 1024
"""Default number of sequences that an instance keeps the state of."""
_SCHEDULERS: Final = ("dynamic_batching", "sequence_batching")


class ModelFunction(Generic[_P, _R]):
    """A function that can be served. Called, it behaves as the function that was decorated."""

    def __init__(
        self,
        target: Callable[_P, _R],
        *,
        name: str,
        batch: int,
        delay: float,
        instances: int,
        setup: Callable[[], Any] | None,
        sequences: int,
        concurrency: int,
        config: Mapping[str, Any],
    ) -> None:
        """Raises ``FunctionMistake`` for what cannot be served."""
        self.target = target
        self.name = name or _name_of(target)
        self.setup = setup
        self.concurrency = concurrency
        functools.update_wrapper(self, target, updated=())
        self._check(batch, delay, instances, sequences, concurrency, config)
        called: Callable[..., Any] = target
        given = 0 if setup is None else 1
        if inspect.isclass(target):
            called, given = self._call_of(target), 1
        self.signature: FunctionSignature = read_signature(called, self.name, batch=batch, given=given)
        if sequences and not self.signature.state:
            raise FunctionMistake(
                f"{self.name}() has sequences={sequences}, but no parameter for their state: add one with the "
                "annotation nerite.SequenceState"
            )
        self._batch, self._delay, self._instances = batch, delay, instances
        self._sequences = (sequences or _MAX_SEQUENCES) if self.signature.state else 0
        self._config = dict(config)
        self._opened: Callable[..., Any] | None = None
        self._opening = threading.Lock()

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call the function itself. What ``setup`` or the class prepares is prepared once, at the first call."""
        if self.setup is None and not inspect.isclass(self.target):
            return self.target(*args, **kwargs)
        with self._opening:
            if self._opened is None:
                self._opened = self.open()
        result: _R = self._opened(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<model '{self.name}'>"

    def open(self) -> Callable[..., Any]:
        """Return the callable of a new instance: creates the object of the class, or calls ``setup``."""
        if inspect.isclass(self.target):
            create: Any = self.target
            return cast(Callable[..., Any], create())
        return self.target if self.setup is None else functools.partial(self.target, self.setup())

    def config(self) -> dict[str, Any]:
        """Return the model configuration, in JSON form."""
        signature = self.signature
        config: dict[str, Any] = {
            "name": self.name,
            "backend": "python",
            "max_batch_size": self._batch,
            "input": [_entry(each) for each in signature.inputs],
            "output": [_entry(each) for each in signature.outputs],
            "instance_group": [{"count": self._instances, "kind": "KIND_CPU"}],
        }
        if signature.stream:
            config["model_transaction_policy"] = {"decoupled": True}
        if signature.state:
            config["sequence_batching"] = {"oldest": {"max_candidate_sequences": self._sequences}}
        elif self._batch:
            config["dynamic_batching"] = {"max_queue_delay_microseconds": round(self._delay * 1e6)}
        if any(key in self._config for key in _SCHEDULERS):
            for key in _SCHEDULERS:
                config.pop(key, None)
        return config | self._config

    @property
    def sequences(self) -> int:
        """Largest number of sequences that an instance keeps the state of; 0 without state."""
        return self._sequences

    def _check(
        self, batch: int, delay: float, instances: int, sequences: int, concurrency: int, config: Mapping[str, Any]
    ) -> None:
        name = self.name
        if not name or len(name) > MAX_NAME or name.startswith(".") or "/" in name or "\0" in name:
            raise FunctionMistake(
                f"'{name}' is not a name for a model: give it one, as in @nerite.model(name='double')"
            )
        for what, value, least in (
            ("batch", batch, 0),
            ("instances", instances, 1),
            ("sequences", sequences, 0),
            ("concurrency", concurrency, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise FunctionMistake(f"{what}={value!r} of {name}() must be an integer of {least} or more")
        if not isinstance(delay, int | float) or not 0 <= delay <= 60:
            raise FunctionMistake(f"delay={delay!r} of {name}() must be seconds, from 0 to 60")
        if delay and not batch:
            raise FunctionMistake(f"delay={delay!r} of {name}() is how long requests wait for a batch: add batch=")
        for key in ("name", "backend", "max_batch_size", "input", "output"):
            if key in config:
                raise FunctionMistake(
                    f"config of {name}() has '{key}', which follows from the function: remove it there"
                )

    def _call_of(self, target: type) -> Callable[..., Any]:
        name = self.name
        if self.setup is not None:
            raise FunctionMistake(f"{name} is a class, whose __init__ runs once per instance: leave out setup=")
        if "__call__" not in vars(target) and not any("__call__" in vars(base) for base in target.__mro__[1:-1]):
            raise FunctionMistake(f"{name} is a class without __call__: define it, with the inputs as parameters")
        for parameter in list(inspect.signature(target.__init__).parameters.values())[1:]:  # type: ignore[misc]
            if parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise FunctionMistake(
                    f"{name}.__init__() needs '{parameter.name}', but instances are created without arguments: give it "
                    "a default"
                )
        call: Callable[..., Any] = target.__call__
        return call


def _name_of(target: object) -> str:
    name = getattr(target, "__name__", "")
    if name == "<lambda>" or not name:
        raise FunctionMistake("this function has no name and no annotations: define it with def")
    return str(name)


def _entry(tensor: FunctionTensor) -> dict[str, Any]:
    """Return an entry of ``input`` or ``output``. A single value has the dimension 1: configurations need one."""
    entry: dict[str, Any] = {
        "name": tensor.name,
        "data_type": tensor.type.datatype.config_name,
        "dims": list(tensor.type.config_dims) or [1],
    }
    if tensor.optional:
        entry["optional"] = True
    return entry


@overload
def model(function: Callable[_P, _R], /) -> ModelFunction[_P, _R]: ...
@overload
def model(
    *,
    name: str = ...,
    batch: int = ...,
    delay: float = ...,
    instances: int = ...,
    setup: Callable[[], Any] | None = ...,
    sequences: int = ...,
    concurrency: int = ...,
    config: Mapping[str, Any] | None = ...,
) -> Callable[[Callable[_P, _R]], ModelFunction[_P, _R]]: ...
def model(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    batch: int = 0,
    delay: float = 0.0,
    instances: int = 1,
    setup: Callable[[], Any] | None = None,
    sequences: int = 0,
    concurrency: int = 64,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Make a function, or a class whose objects are called, a model. Raises ``FunctionMistake``, with the remedy.

    ``batch``: rows that the function gets at once, batch dimension first; 0: one request per call. ``delay``: seconds
    that a request may wait for others. ``instances``: copies that work at the same time. ``setup`` is called once per
    instance; its result is the first argument. ``sequences``: bound of sequences with a state at the same time, per
    instance. ``concurrency``: calls in progress of an async function, per instance. ``config``: further fields of the
    model configuration, in JSON form.
    """

    def decorate(target: Callable[..., Any]) -> ModelFunction[..., Any]:
        if isinstance(target, ModelFunction):
            raise FunctionMistake(f"{target.name}() is a model already: decorate it once")
        return ModelFunction(
            target,
            name=name,
            batch=batch,
            delay=delay,
            instances=instances,
            setup=setup,
            sequences=sequences,
            concurrency=concurrency,
            config=config or {},
        )

    return decorate if function is None else decorate(function)


def functions_in(namespace: Mapping[str, Any]) -> Iterator[tuple[str, ModelFunction[..., Any]]]:
    """Yield the functions of a module that can be served, by the names of its variables."""
    for variable, value in namespace.items():
        if isinstance(value, ModelFunction):
            yield variable, value
