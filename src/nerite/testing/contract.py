r"""Tests that every backend must pass, to be inherited.

    from nerite.testing import BackendContract

    class TestLookup(BackendContract):
        backend = LookupBackend()

        def write_model(self, directory):
            (directory / "1").mkdir(parents=True)
            (directory / "1" / "table.csv").write_text("name,size\nant,1\nbee,2\n")

        def requests(self):
            return [{"name": [["ant"]]}, {"name": [["bee"]]}]

        def answer(self, inputs):
            return {"size": np.where(inputs["name"] == b"ant", 1, 2).astype(np.float32)}

pytest runs the inherited tests. They call the backend in the test's process with one model; whether the server can
serve it is left to a test that starts a server.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np
from numpy.typing import ArrayLike

from nerite.backends.interface import Backend, ExecutionTimes, Instance
from nerite.config.loading import apply_completion
from nerite.core.errors import NeriteError
from nerite.core.tensor import BYTES
from nerite.testing.model_under_test import OpenedModel, executed
from nerite.testing.requests import Answer, Request, SentRequest, to_test


class BackendUnderTest:
    """Definitions that a test class provides: a backend, a model for it, and its correct answers.

    ``bad_request`` and ``break_model`` are optional.
    """

    backend: Backend
    settings: ClassVar[Mapping[str, str]] = {"default-max-batch-size": "4"}
    """The values of ``--backend-config``."""
    tolerance = 1e-5
    """Tolerated relative and absolute error of numbers."""

    def write_model(self, directory: Path) -> None:
        """Write a model to a directory that does not exist yet: version 1, and config.pbtxt if it needs one."""
        raise NotImplementedError

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        """Return the inputs of at least two requests with different answers; two of them have the same shapes."""
        raise NotImplementedError

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        """Return the correct outputs for these inputs."""
        raise NotImplementedError

    def bad_request(self) -> Mapping[str, ArrayLike]:
        """Return inputs that match the configuration but that the model cannot answer."""
        raise SkipTest("no inputs are bad for this model")

    def break_model(self, directory: Path) -> None:
        """Damage the model's files so that they cannot be loaded."""
        raise SkipTest("this model cannot be broken")

    @contextmanager
    def opened(self, folder: Path, name: str = "m", *, elsewhere: bool = False) -> Iterator[OpenedModel]:
        """Write the model and open it."""
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
        """Send an unusual request, which may fail, and then a usual one, which must succeed."""
        instance = model.instance()
        answer = self.ask(model, instance, inputs)
        if not isinstance(answer, NeriteError):
            self.check(inputs, answer)
        usual = self.requests()[0]
        self.check(usual, self.ask(model, instance, usual))
        model.close_instance(instance)

    def batch(self, model: OpenedModel) -> list[tuple[Mapping[str, ArrayLike], SentRequest]]:
        """Return requests that the server could put into one batch."""
        limit = model.signature.max_batch_size
        if limit <= 1:
            raise SkipTest("the model takes one request at a time")
        first, *others = [(inputs, self.sent(model, inputs)) for inputs in self.requests()]
        batch, rows = [first], first[1].header.batch_size
        for inputs, request in others:
            rows += request.header.batch_size
            if request.header.batch_key == first[1].header.batch_key and rows <= limit:
                batch.append((inputs, request))
        assert len(batch) > 1, "requests() must contain two of the same shape that fit into one batch"
        return batch

    def check(self, inputs: Mapping[str, ArrayLike], answer: Answer | NeriteError, only: str = "") -> None:
        """Raise ``AssertionError`` unless the answer is correct: all outputs, or ``only`` the requested one."""
        if isinstance(answer, NeriteError):
            raise AssertionError(f"an error instead of an answer: {answer}") from answer
        expected = self.answer({name: _as_given(value) for name, value in inputs.items()})
        names = {only} if only else set(expected)
        assert set(answer) == names, f"outputs {sorted(answer)} instead of {sorted(names)}"
        for name in names:
            right = _as_given(expected[name])
            if right.dtype == object:
                np.testing.assert_array_equal(answer[name], right, name)
            else:
                np.testing.assert_allclose(answer[name], right, self.tolerance, self.tolerance, err_msg=name)


def _as_given(value: ArrayLike) -> Any:
    """Return a test's value as an array; strings as ``bytes`` objects, the form in which they arrive."""
    array = np.asarray(value)
    if array.dtype.kind not in "OU":
        return array
    flat = [item.encode() if isinstance(item, str) else item for item in array.ravel()]
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(array.shape)


def arrays_of(request: SentRequest) -> Answer:
    """Return the inputs of a request as copies in arrays."""
    return {spec.name: to_test(spec, data) for spec, data in zip(request.header.inputs, request.buffers, strict=True)}


_START_SECONDS = 60.0
"""Seconds that threads wait for each other."""
_ODD_STRINGS = (b"", "žluťoučký 🐚".encode(), b"\xff\xfe not UTF-8", b"with \0 in it", b"x" * 70_000)


class BackendContract(BackendUnderTest):
    """Tests that pytest finds in a class that inherits this."""

    loads = 50
    most_growth = 16 << 20
    """Bytes that these loads may leave behind, in caches and memory allocators."""

    def test_it_says_what_it_is(self) -> None:
        """The attributes ``name`` and ``isolated`` are valid."""
        name, isolated = self.backend.name, getattr(self.backend, "isolated", True)
        assert isinstance(name, str) and name, "'name' is the backend's name in configurations"
        assert isinstance(isolated, bool), "'isolated' is True for worker processes, False for threads"

    def test_completing_what_is_complete_changes_nothing(self, tmp_path: Path) -> None:
        """A client may send back the configuration it got. ``complete`` does not modify its argument."""
        with self.opened(tmp_path) as model:
            before = _copy(model.context.config)
            completed = self.backend.complete(model.context)
            assert model.context.config == before, "complete() has modified the configuration it was given"
            assert apply_completion(model.config, completed) == model.config, "complete() is not idempotent"

    def test_it_answers(self, tmp_path: Path) -> None:
        """Requests are answered one after the other."""
        with self.opened(tmp_path) as model:
            instance = model.instance()
            for inputs in self.requests():
                self.check(inputs, self.ask(model, instance, inputs))

    def test_another_process_may_have_completed_the_configuration(self, tmp_path: Path) -> None:
        """``open`` then gets an empty memo, and a configuration that was decoded from JSON."""
        with self.opened(tmp_path, elsewhere=True) as model:
            inputs = self.requests()[0]
            self.check(inputs, self.ask(model, model.instance(), inputs))

    def test_a_batch_is_answered_in_order(self, tmp_path: Path) -> None:
        """Each request of a batch gets its own answer."""
        with self.opened(tmp_path) as model:
            batch = self.batch(model)
            answers = executed(model.instance(), [request for _, request in batch])
            for (inputs, _), answer in zip(batch, answers, strict=True):
                self.check(inputs, answer)

    def test_what_is_not_wanted_is_left_out(self, tmp_path: Path) -> None:
        """A request may name the outputs that it wants (``header.wanted``)."""
        with self.opened(tmp_path) as model:
            instance = model.instance()
            inputs = self.requests()[0]
            for name in model.signature.outputs:
                answer = self.ask(model, instance, inputs, outputs=[name])
                self.check(inputs, answer, only=name)

    def test_outputs_are_as_declared(self, tmp_path: Path) -> None:
        """Types and shapes match the configuration."""
        with self.opened(tmp_path) as model:
            request = self.sent(model, self.requests()[0])
            (response,) = model.instance().execute([request], ExecutionTimes())
            if response is None:
                raise SkipTest("it answers through the request")
            assert response.header is not None, f"an error: {response.error}"
            batched = model.signature.max_batch_size > 0
            for spec in response.header.outputs:
                declared = model.signature.outputs[spec.name]
                shape = spec.shape[1:] if batched else spec.shape
                assert spec.datatype is declared.datatype, f"'{spec.name}' is {spec.datatype.name}"
                assert _fits(shape, declared.dims), f"'{spec.name}' has shape {list(spec.shape)}"

    def test_inputs_may_be_read_only(self, tmp_path: Path) -> None:
        """Inputs may be in a client's shared memory."""
        with self.opened(tmp_path) as model:
            inputs = self.requests()[0]
            request = self.sent(model, inputs)
            frozen = [bytes(data) for data in request.buffers]
            request.data = [memoryview(data) for data in frozen]
            self.check(inputs, executed(model.instance(), [request])[0])

    def test_answers_stay_what_they_are(self, tmp_path: Path) -> None:
        """The server may still be sending responses while the instance executes the next batch."""
        with self.opened(tmp_path) as model:
            instance = model.instance()
            kept = []
            for inputs in self.requests():
                (response,) = instance.execute([self.sent(model, inputs)], ExecutionTimes())
                if response is None:
                    raise SkipTest("it answers through the request")
                kept.append((inputs, response))
            model.close_instance(instance)
            for inputs, response in kept:
                assert response.header is not None, f"an error: {response.error}"
                outputs = zip(response.header.outputs, response.buffers, strict=True)
                self.check(inputs, {spec.name: to_test(spec, data) for spec, data in outputs})

    def test_instances_work_side_by_side(self, tmp_path: Path) -> None:
        """Instances run concurrently in threads; one continues after the other is closed."""
        with self.opened(tmp_path) as model:
            instances = [model.instance(), model.instance()]
            start = threading.Barrier(len(instances), timeout=_START_SECONDS)

            def work(instance: Instance) -> None:
                start.wait()
                for inputs in [*self.requests()] * 10:
                    self.check(inputs, self.ask(model, instance, inputs))

            with ThreadPoolExecutor(len(instances)) as threads:
                for done in [threads.submit(work, instance) for instance in instances]:
                    done.result()
            model.close_instance(instances[0])
            inputs = self.requests()[0]
            self.check(inputs, self.ask(model, instances[1], inputs))

    def test_models_are_loaded_side_by_side(self, tmp_path: Path) -> None:
        """The server loads several models concurrently."""
        folders = [tmp_path / name for name in ("one", "other")]
        for folder in folders:
            self.write_model(folder)

        def load(folder: Path) -> None:
            with OpenedModel(self.backend, folder, self.settings) as model:
                inputs = self.requests()[0]
                self.check(inputs, self.ask(model, model.instance(), inputs))

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(load, folder) for folder in folders]:
                done.result()

    def test_an_instance_is_ready(self, tmp_path: Path) -> None:
        """An instance is ready from the beginning."""
        with self.opened(tmp_path) as model:
            instance = model.instance()
            assert instance.is_ready() is True
            self.ask(model, instance, self.requests()[0])
            assert instance.is_ready() is True

    def test_it_goes_on_after_a_bad_request(self, tmp_path: Path) -> None:
        """An error has a text and does not affect later requests."""
        bad = self.bad_request()
        with self.opened(tmp_path) as model:
            instance = model.instance()
            answer = self.ask(model, instance, bad)
            assert isinstance(answer, NeriteError), "an answer to a request that cannot be answered"
            assert str(answer), "an error without a text"
            inputs = self.requests()[0]
            self.check(inputs, self.ask(model, instance, inputs))

    def test_tensors_without_elements(self, tmp_path: Path) -> None:
        """A variable dimension may be 0. An error is a valid answer; the next request must succeed."""
        with self.opened(tmp_path) as model:
            inputs, first = self.requests()[0], int(model.signature.max_batch_size > 0)
            empty = arrays_of(self.sent(model, inputs))
            for name, declared in model.signature.inputs.items():
                for axis, size in enumerate(declared.dims, first):
                    if size == -1 and name in empty:
                        empty[name] = empty[name].take(range(0), axis)
            if all(array.size for array in empty.values()):
                raise SkipTest("no input has a dimension that may be 0")
            self.try_odd(model, empty)

    def test_strings_of_any_bytes(self, tmp_path: Path) -> None:
        """A string may contain any bytes. An error is a valid answer; the next request must succeed."""
        with self.opened(tmp_path) as model:
            if all(declared.datatype is not BYTES for declared in model.signature.inputs.values()):
                raise SkipTest("no input is of strings")
            inputs = arrays_of(self.sent(model, self.requests()[0]))
            for odd in _ODD_STRINGS:
                for name, array in inputs.items():
                    if model.signature.inputs[name].datatype is BYTES:
                        array[...] = odd
                self.try_odd(model, inputs)

    def test_a_broken_model_is_refused(self, tmp_path: Path) -> None:
        """``complete``, ``open`` or ``instance`` raises a ``NeriteError``, not an exception of the framework."""
        self.write_model(tmp_path / "m")
        self.break_model(tmp_path / "m")
        try:
            with OpenedModel(self.backend, tmp_path / "m", self.settings) as model:
                model.instance()
        except NeriteError as error:
            assert str(error), "an error without a text"
        else:
            raise AssertionError("a broken model was loaded")

    def test_nothing_is_left_of_models_that_came_and_went(self, tmp_path: Path) -> None:
        """No descriptor or thread remains, and memory stays within ``most_growth``, even if closed objects are kept."""
        self.write_model(tmp_path / "m")
        known: list[object] = []

        def load(times: int) -> dict[str, int]:
            for _ in range(times):
                with OpenedModel(self.backend, tmp_path / "m", self.settings) as model:
                    instance = model.instance()
                    self.ask(model, instance, self.requests()[0])
                known.append((model, instance))
            gc.collect()
            return _footprint()

        before = load(max(self.loads // 5, 3))
        after = load(self.loads)
        for what, limit in (("descriptors", 0), ("threads", 0), ("bytes", self.most_growth)):
            more = after.get(what, 0) - before.get(what, 0)
            assert more <= limit, f"{self.loads} loads left {more} {what}"


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _footprint() -> dict[str, int]:
    """Return the descriptors, threads and memory of this process, as far as the system reports them."""
    try:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        }
    except OSError:  # not Linux
        return {"threads": threading.active_count()}
