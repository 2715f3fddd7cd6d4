"""Warm-up: each instance executes the model's samples before it accepts requests.

Samples come from ``model_warmup`` in the configuration and from files of recorded requests.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.configuration import made_inputs
from nerite.config.json_form import to_json
from nerite.config.mistake import Mistake
from nerite.config.model_config import ModelConfig, ModelWarmup
from nerite.core import tensor as dtypes
from nerite.core.client_text import check_inside_directory
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import report
from nerite.core.request import NOBODY, InferenceRequest, ReplySink, RequestHeader, with_request_id
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import Buffer, DataType, TensorSpec, join_bytes
from nerite.dispatch.sequence_inputs import Said, SequenceInputs, SequenceRequirements
from nerite.instances.instance import Batch, ModelInstance
from nerite.instances.placement import InstancePlan
from nerite.models.instance_factory import InstanceFactory
from nerite.observability.load_times import stage
from nerite.scheduling.sequence import RequestSequence, SequenceRequest
from nerite.workers.host.server_context import ReadRequest


class WarmUpRun:
    """Sequences of one instance during warm-up: adds controls and states to samples, and reschedules iterative ones.

    A sample is a sequence of one request; the rows of a batch have the correlation ids 1, 2 and so on. A recorded
    request with a correlation id keeps it, and continues the sequence of an earlier one if there was one.
    """

    def __init__(self, attach: SequenceInputs, *, iterative: bool) -> None:
        self._attach = attach
        self._iterative = iterative
        self._recorded: dict[int | str, RequestSequence] = {}

    def begin(self, batch: Batch, said: Said) -> Batch:
        """Return the requests of a sample as the model sees them; ``said`` are control inputs that the sample sets."""
        attached: Batch = []
        for number, outer in enumerate(batch, 1):
            request = SequenceRequest(outer)
            if request.sequence_id:
                self._continue_sequence(request)
            else:
                request.sequence, request.starts, request.ends = RequestSequence(number), True, not self._iterative
            self._attach.attach(request, request.sequence, start=request.starts, end=request.ends)
            if said:
                self._attach.overrule(request, said)
            attached.append(request)
        return attached

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse:
        """Store the state outputs of a response; return the response without them."""
        assert isinstance(request, SequenceRequest)
        return self._attach.settle(request, response, request.sequence)

    def again(self, request: InferenceRequest) -> None:
        """Prepare a rescheduled request with the state that it left."""
        assert isinstance(request, SequenceRequest)
        request.detach()
        self._attach.attach(request, request.sequence, start=False, end=request.ends)

    def _continue_sequence(self, request: SequenceRequest) -> None:
        known = self._recorded.pop(request.sequence_id, None)
        if known is None or request.starts:
            request.starts, known = True, RequestSequence(request.sequence_id)
        request.sequence = known
        if not request.ends:
            self._recorded[request.sequence_id] = known


# Samples of ``model_warmup``, from the configuration and the files in ``warmup/``.

FOLDER = "warmup"


class WarmUpSample(NamedTuple):
    """Request that each instance must answer before it accepts others."""

    name: str
    rows: int
    """Number of single-row requests that run as one batch."""
    times: int
    """Number of executions."""
    header: RequestHeader
    data: Sequence[Buffer]
    said: Said = MappingProxyType({})
    """Sequence models: values of control and state inputs that the sample sets instead of the server."""

    def requests(self, sink: ReplySink, now_ns: int) -> list[InferenceRequest]:
        """Return a batch with its own copy of the data, because models may modify inputs in place."""
        return [
            InferenceRequest(self.header, [bytearray(each) for each in self.data], sink, now_ns)
            for _ in range(self.rows)
        ]


def configured_samples(
    config: ModelConfig, signature: Signature, directory: Path, skipped: Callable[[str], None]
) -> list[WarmUpSample]:
    """Return the configured samples of the model in ``directory``. Blocks. Raises Triton's errors.

    ``skipped`` is called with the name of each sample with batch size 0, which is not run.
    """
    made = []
    server_inputs = _server_inputs(config, signature)
    for warmup in config.model_warmup:
        if warmup.batch_size:
            try:
                made.append(_sample(warmup, signature, server_inputs, directory))
            except NeriteError as error:
                raise type(error)(f"{error.message}\n    {_sample_remedy(warmup)}") from None
        else:
            skipped(warmup.name)
    return made


def warm_up_mistakes(config: ModelConfig, signature: Signature, directory: Path) -> list[Mistake]:
    """Return the mistakes in the configured samples of a model. Blocks, and raises nothing."""
    found = []
    server_inputs = _server_inputs(config, signature)
    for index, warmup in enumerate(config.model_warmup):
        try:
            if warmup.batch_size:
                _sample(warmup, signature, server_inputs, directory)
        except NeriteError as error:
            place = ("model_warmup", index)
            found.append(Mistake(message=error.message, path=place, remedy=_sample_remedy(warmup), error=type(error)))
    return found


def _sample_remedy(warmup: ModelWarmup) -> str:
    return f"The sample '{warmup.name}' of 'model_warmup' is invalid."


def _server_inputs(config: ModelConfig, signature: Signature) -> Signature:
    """Return the inputs that only the server or a sample can set: controls and states of sequences."""
    given = to_json(config)
    inputs = [
        SignatureInput(each["name"], dtypes.BY_CONFIG_NAME[each["data_type"]], tuple(each["dims"]), optional=True)
        for each in made_inputs(given)
    ]
    return Signature(signature.model_name, signature.max_batch_size, inputs, [])


def _sample(warmup: ModelWarmup, signature: Signature, server_inputs: Signature, directory: Path) -> WarmUpSample:
    limit = signature.max_batch_size
    if warmup.batch_size > max(limit, 1):
        raise InvalidArgument(
            f"failed to run warmup sample '{warmup.name}': batch size {warmup.batch_size} for "
            f"'{signature.model_name}', max allowed is {limit}; "
        )
    batch = (1,) if limit > 0 else ()
    asked: dict[str, tuple[TensorSpec, Buffer]] = {}
    said: dict[str, tuple[TensorSpec, Buffer]] = {}
    for name, declared in warmup.inputs.items():
        if any(size < 0 for size in declared.dims):
            raise InvalidArgument(
                f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
            )
        spec = TensorSpec(name, dtypes.BY_CONFIG_NAME[declared.data_type], (*batch, *declared.dims))
        tensors = said if name in server_inputs.inputs else asked
        tensors[name] = spec, _data(declared, spec, directory / FOLDER)
    sample = WarmUpSample(warmup.name, warmup.batch_size, max(warmup.count, 1), *_request(signature, asked), said)
    checked_sample(WarmUpSample(sample.name, 1, 1, *_request(server_inputs, said)), server_inputs)
    return checked_sample(sample, signature)


def _request(signature: Signature, tensors: Said) -> tuple[RequestHeader, list[Buffer]]:
    """Return a request with these inputs. Raises the error that a client would get if they are invalid."""
    header = RequestHeader(signature.model_name, "", [spec for spec, _ in tensors.values()])
    signature.bind(header)
    return header, [data for _, data in tensors.values()]


def checked_sample(sample: WarmUpSample, signature: Signature) -> WarmUpSample:
    """Return ``sample`` if its data matches its header. Raises the error that a client would get otherwise."""
    wrong = signature.check_data(sample.requests(NOBODY, 0)[0])
    if wrong is not None:
        raise wrong
    return sample


def _data(declared: ModelWarmup.Input, spec: TensorSpec, folder: Path) -> bytes:
    """Return the data of an input for one row."""
    if declared.input_data_file is not None:
        return _from_file(declared.input_data_file, spec, folder)
    if declared.zero_data is None and declared.random_data is None:
        wrong = f"warmup setting expects input '{spec.name}' to have input_data_type set"
        raise with_request_id(InvalidArgument(wrong), "")
    if spec.datatype is dtypes.BYTES:
        return bytes(join_bytes([b""] * spec.elements))
    return _random(spec.datatype, spec.elements) if declared.random_data is not None else bytes(spec.byte_size)


def _from_file(name: str, spec: TensorSpec, folder: Path) -> bytes:
    content = read_sample_file(name, f"input '{spec.name}'", folder)
    if len(content) < spec.byte_size:
        wrong = f"warmup setting expects {spec.byte_size} bytes, but the data provided from {name} only has "
        raise with_request_id(InvalidArgument(f"{wrong}{len(content)} bytes"), "")
    return content if spec.byte_size < 0 else content[: spec.byte_size]


def read_sample_file(name: str, of: str, folder: Path) -> bytes:
    """Return the content of a file in ``folder``; ``of`` names the setting in errors. Raises ``NeriteError``."""
    path = folder / name
    check_inside_directory(name, f"warmup data file '{name}' of {of}", folder)
    try:
        return path.read_bytes()
    except OSError as error:
        raise Internal(f"failed to open text file for read {path}: {error.strerror}") from None


def _random(datatype: DataType, elements: int) -> bytes:
    """Return random values: integers over the full range of the type, floating-point numbers in [0, 1)."""
    if datatype is dtypes.BOOL:
        return bytes(random.choices((0, 1), k=elements))
    if datatype is dtypes.BF16:
        return (np.random.default_rng().random(elements, np.float32).view("<u4") >> 16).astype("<u2").tobytes()
    if datatype.numpy.kind == "f":
        return np.random.default_rng().random(elements).astype(datatype.numpy).tobytes()
    return random.randbytes(elements * datatype.size)


_log = logging.getLogger("nerite.execution")


class WarmUpFactory:
    """``InstanceFactory`` decorator that warms up the created instances concurrently."""

    def __init__(
        self,
        factory: InstanceFactory,
        model: str,
        samples: Sequence[WarmUpSample],
        warm_up_run: Callable[[], WarmUpRun] | None = None,
    ) -> None:
        """``warm_up_run`` creates the state of one instance's warm-up; for sequence models only."""
        self._factory = factory
        self._model = model
        self._samples = samples
        self._warm_up_run = warm_up_run

    async def make(self, plans: Sequence[InstancePlan], config: dict[str, Any]) -> list[ModelInstance]:
        """Create instances and run all samples on them. If one fails, all are closed and the error is raised."""
        instances = await self._factory.make(plans, config)
        with stage("warm-up"):
            outcomes = await asyncio.gather(*map(self._warm_up, instances), return_exceptions=True)
        failure = next((outcome for outcome in outcomes if outcome is not None), None)
        if failure is not None:
            await asyncio.gather(*map(_closed, instances))
            raise failure
        return instances

    def close(self) -> None:
        """Release resources that the instances share."""
        self._factory.close()

    async def _warm_up(self, instance: ModelInstance) -> None:
        warm_up_run = None if self._warm_up_run is None else self._warm_up_run()
        for sample in self._samples:
            for iteration in range(1, sample.times + 1):
                _log.debug(
                    "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                    self._model,
                    instance.name,
                    sample.name,
                    iteration,
                )
                await _Trial(instance, warm_up_run).run(sample)


class _Trial:
    """Execution of one sample batch on one instance; also the sink of its requests."""

    def __init__(self, instance: ModelInstance, warm_up_run: WarmUpRun | None) -> None:
        self._instance = instance
        self._warm_up_run = warm_up_run
        self._errors: list[NeriteError] = []
        self._open = 0
        """Number of requests without their final response."""
        self._running = False
        """The instance executes the batch. A model may send the final response before it returns."""
        self._over = asyncio.Event()
        instance.done = self._done
        instance.part = self._part
        instance.on_usable = lambda _: None

    async def run(self, sample: WarmUpSample) -> None:
        """Run a batch until every request has its final response. Raises ``NeriteError`` if one failed."""
        if not self._instance.usable:
            raise self._died()
        batch = sample.requests(self, time.monotonic_ns())
        self._open = len(batch)
        if self._warm_up_run is not None:
            batch = self._warm_up_run.begin(batch, sample.said)
        self._execute(batch)
        await self._over.wait()
        if self._errors:
            reasons = "".join(f"{error.message}; " for error in dict.fromkeys(self._errors))
            raise InvalidArgument(f"failed to run warmup sample '{sample.name}': {reasons}")

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Record a response."""
        if response.error is not None:
            self._errors.append(response.error)
        if final:
            self._open -= 1
            self._check_over()

    def _check_over(self) -> None:
        if not self._open and not self._running:
            self._over.set()

    def _done(
        self,
        instance: ModelInstance,
        batch: Batch,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes | None,
    ) -> None:
        self._running = False
        again: Batch = []
        for request, response in zip(batch, responses, strict=True):
            if response is None:
                continue
            rest = self._settled(request, response)
            if response.again:
                again.append(request)
            else:
                request.respond(rest)
        if again:  # not synchronously: an instance on the loop would recurse without end
            asyncio.get_running_loop().call_soon(self._run_again, again)
        self._check_over()

    def _part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, timings: ExecutionTimes | None
    ) -> None:
        rest = self._settled(request, response)
        if final or not rest.empty:
            request.respond(rest, final)

    def _settled(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse:
        return response if self._warm_up_run is None else self._warm_up_run.settle(request, response)

    def _run_again(self, batch: Batch) -> None:
        assert self._warm_up_run is not None, "only models of iterative sequences reschedule requests"
        for request in batch:
            self._warm_up_run.again(request)
            if not self._instance.usable:
                request.respond(InferenceResponse.failed(self._died()))
        if self._instance.usable:
            self._execute(batch)

    def _execute(self, batch: Batch) -> None:
        self._running = True
        try:
            self._instance.run(batch)
        except Exception as error:
            self._running = False
            failure = report("dispatcher", error, f"while instance '{self._instance.name}' was warmed up")
            for request in batch:
                request.respond(InferenceResponse.failed(failure))

    def _died(self) -> NeriteError:
        return Unavailable(f"instance '{self._instance.name}' died")


async def _closed(instance: ModelInstance) -> None:
    """Close an instance and wait until it is closed."""
    done = asyncio.Event()
    instance.close(done.set)
    await done.wait()


# Recorded requests: a file in ``warmup/`` with one request per line, as clients send it. The parameter
# ``WARMUP_REQUESTS`` of the configuration names the file; Triton ignores it.
PARAMETER: Final = "WARMUP_REQUESTS"


def recorded_samples(
    config: ModelConfig, signature: Signature, directory: Path, read: ReadRequest
) -> list[WarmUpSample]:
    """Return the recorded requests of the model in ``directory``. Blocks. Raises ``NeriteError``."""
    made = []
    for place, line in _lines(config, directory):
        try:
            made.append(_recorded_sample(place, line, config, signature, read))
        except NeriteError as error:
            raise type(error)(f"{error.message}\n    {_recorded_remedy(place)}") from None
    return made


def recorded_mistakes(config: ModelConfig, signature: Signature, directory: Path, read: ReadRequest) -> list[Mistake]:
    """Return the mistakes in the recorded requests of a model. Blocks, and raises nothing."""
    path = ("parameters", PARAMETER)
    found: list[Mistake] = []
    try:
        for place, line in _lines(config, directory):
            try:
                _recorded_sample(place, line, config, signature, read)
            except NeriteError as error:
                found.append(
                    Mistake(message=error.message, path=path, remedy=_recorded_remedy(place), error=type(error))
                )
    except NeriteError as error:
        remedy = f"Specify the name of a file in {directory / FOLDER} with one request per line."
        found.append(Mistake(message=error.message, path=path, remedy=remedy, error=type(error)))
    return found


def _lines(config: ModelConfig, directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the text of each recorded request. Raises ``NeriteError`` if the file cannot be read."""
    parameter = config.parameters.get(PARAMETER)
    if parameter is None:
        return
    name = parameter.string_value
    for number, line in enumerate(
        read_sample_file(name, f"parameter '{PARAMETER}'", directory / FOLDER).split(b"\n"), 1
    ):
        if line.strip():
            yield f"{name}:{number}", line


def _recorded_sample(
    place: str, line: bytes, config: ModelConfig, signature: Signature, read: ReadRequest
) -> WarmUpSample:
    header, data = read(signature.model_name, line)
    signature.bind(header)
    if config.sequence_batching is not None:
        # A request without a correlation id is a sequence of its own.
        refusal = SequenceRequirements(config).refusal(header, header.sequence_id or 1, "")
        if refusal is not None:
            raise refusal
    return checked_sample(WarmUpSample(place, 1, 1, header, data), signature)


def _recorded_remedy(place: str) -> str:
    return f"The recorded request at {FOLDER}/{place} is invalid."
