"""A backend, a model for it, and how its answers are judged: what the tests of ``contract.py`` have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np
from numpy.typing import ArrayLike

from nerite.backends.interface import Backend, Instance
from nerite.core.errors import NeriteError
from nerite.testing.arrays import Answer, to_test
from nerite.testing.opened_model import OpenedModel, executed
from nerite.testing.requests import Request, SentRequest


class BackendUnderTest:
    """What a test class says. The last two methods are for models that there is something to say of."""

    backend: Backend
    settings: ClassVar[Mapping[str, str]] = {"default-max-batch-size": "4"}
    """What ``--backend-config`` would say."""
    tolerance = 1e-5
    """How far numbers may be off, relatively."""

    def write_model(self, directory: Path) -> None:
        """Write a model into a directory that is not there yet: version 1, and config.pbtxt if it takes one."""
        raise NotImplementedError

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        """Return the inputs of two requests or more, all with different answers; two of them of the same shapes."""
        raise NotImplementedError

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        """Return the outputs that are right for these inputs."""
        raise NotImplementedError

    def bad_request(self) -> Mapping[str, ArrayLike]:
        """Return inputs that fit the configuration, and that the model cannot answer."""
        raise SkipTest("no inputs are bad for this model")

    def break_model(self, directory: Path) -> None:
        """Damage the model's files, so that they cannot be loaded."""
        raise SkipTest("this model cannot be broken")

    @contextmanager
    def opened(self, folder: Path, name: str = "m", *, elsewhere: bool = False) -> Iterator[OpenedModel]:
        """Write the model, and open it."""
        self.write_model(folder / name)
        with OpenedModel(self.backend, folder / name, self.settings, elsewhere=elsewhere) as model:
            yield model

    def sent(self, model: OpenedModel, inputs: Mapping[str, ArrayLike], outputs: Sequence[str] = ()) -> SentRequest:
        """Return a request with these inputs."""
        return Request(inputs, outputs=outputs).sent_to(model.signature)

    def ask(
        self, model: OpenedModel, instance: Instance, inputs: Mapping[str, ArrayLike], outputs: Sequence[str] = ()
    ) -> Answer | NeriteError:
        """Return the answer to a request with these inputs."""
        return executed(instance, [self.sent(model, inputs, outputs)])[0]

    def try_odd(self, model: OpenedModel, inputs: Answer) -> None:
        """Ask something that may be too odd to be answered, and then something else."""
        instance = model.instance()
        answer = self.ask(model, instance, inputs)
        if not isinstance(answer, NeriteError):
            self.check(inputs, answer)
        usual = self.requests()[0]
        self.check(usual, self.ask(model, instance, usual))
        model.close_instance(instance)

    def batch(self, model: OpenedModel) -> list[tuple[Mapping[str, ArrayLike], SentRequest]]:
        """Return requests that the server may give to the model at once."""
        limit = model.signature.max_batch_size
        if limit <= 1:
            raise SkipTest("the model takes one request at a time")
        first, *others = [(inputs, self.sent(model, inputs)) for inputs in self.requests()]
        batch, rows = [first], first[1].header.batch_size
        for inputs, request in others:
            rows += request.header.batch_size
            if request.header.batch_key == first[1].header.batch_key and rows <= limit:
                batch.append((inputs, request))
        assert len(batch) > 1, "requests() needs two of one shape that fit into a batch together"
        return batch

    def check(self, inputs: Mapping[str, ArrayLike], answer: Answer | NeriteError, only: str = "") -> None:
        """Raise ``AssertionError`` unless the answer is right: all outputs, or the only one that was wanted."""
        if isinstance(answer, NeriteError):
            raise AssertionError(f"an error in place of an answer: {answer}") from answer
        expected = self.answer({name: _as_given(value) for name, value in inputs.items()})
        names = {only} if only else set(expected)
        assert set(answer) == names, f"outputs {sorted(answer)} in place of {sorted(names)}"
        for name in names:
            right = _as_given(expected[name])
            if right.dtype == object:
                np.testing.assert_array_equal(answer[name], right, name)
            else:
                np.testing.assert_allclose(answer[name], right, self.tolerance, self.tolerance, err_msg=name)


def _as_given(value: ArrayLike) -> Any:
    """Return a test's value as an array; strings as objects of ``bytes``, as they arrive."""
    array = np.asarray(value)
    if array.dtype.kind not in "OU":
        return array
    flat = [item.encode() if isinstance(item, str) else item for item in array.ravel()]
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(array.shape)


def arrays_of(request: SentRequest) -> Answer:
    """Return the inputs of a request as arrays of their own."""
    return {spec.name: to_test(spec, data) for spec, data in zip(request.header.inputs, request.data, strict=True)}
