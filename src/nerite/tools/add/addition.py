"""Adds a model: recognises, stages, tries and measures it, and moves it into place. A failure leaves nothing behind."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from nerite.artifacts.artifact import Artifact, Candidate
from nerite.artifacts.recognition import recognise
from nerite.backends import registry
from nerite.client import Client, ClientError, TensorDescription
from nerite.config.defaults import others_with_the_file
from nerite.config.json_form import from_json, to_json
from nerite.config.loading import CONFIG_FILE
from nerite.config.model_config import ModelConfig, ModelParameter
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotFound
from nerite.core.sample_inputs import Sizes
from nerite.core.tensor import Array
from nerite.tools.add import proposal
from nerite.tools.add.destination import Destination, check_name, declared, destination, fit_name
from nerite.tools.add.order import LANGUAGE_MODELS, AddOrder, AddOutcome, Staging, Watcher
from nerite.tools.add.proposal import (
    PRECISION_TOLERANCE,
    Advice,
    Contestant,
    ContestVerdict,
    Latency,
    TrialServer,
    contest_verdict,
    propose,
)
from nerite.tools.bench.requests import Request, made_up_data
from nerite.tools.trial_inputs import (
    Shapes,
    check_shapes,
    chosen_shapes,
    first_answered,
    is_enlarged,
    shapes_to_try,
    sizes_advice,
    variable_inputs,
)

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


_COUNTS: Final = (1, 2)
"""Numbers of instances to compare."""
_REPEATS: Final = 4
_SLOW_LOAD: Final = 5.0
"""Load time in seconds from which on numbers of instances are compared with half of the repeats."""
_LIMIT: Final = re.compile(r"Set max_batch_size: ([1-9]\d*)")
"""Remedy in the error of a load with batches that are larger than the model takes."""
_PRECISION: Final = "INFERENCE_PRECISION_HINT"
_PRECISIONS: Final = {_PRECISION, "HINT_BF16", "EXECUTION_MODE_HINT"}
"""Parameters of OpenVINO with which the user has chosen a precision."""


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
        self._inputs: Sequence[TensorDescription] = ()
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._precisions: dict[str, Advice] = {}
        """By backend: the precision that it is set to because its default changes the outputs."""

    def run(self, config: ModelConfig, largest: int, rivals: Sequence[str]) -> None:
        """Measure batches up to ``largest`` with the model's own backend and its ``rivals``, and propose settings."""
        outcome = self._outcome
        if obstacle := _obstacle(config):
            outcome.remarks.append(f"Not measured: {obstacle}.")
            return
        needed = {tensor.name for tensor in config.input if not tensor.optional}
        self._inputs = [tensor for tensor in self._model.inputs if tensor.name in needed]
        try:
            config = self._with_batches(config, largest)
            sample = self._sample(batching=config.max_batch_size > 0)
            config, measured, contest = self._contest(config, rivals, sample)
            outcome.throughputs = proposal.by_count(list(self._rates(config, sample)))
        except (ClientError, NeriteError) as error:
            outcome.remarks.append(f"Not measured, because it fails with random data: {_reason(error)}")
            return
        outcome.proposal = propose(config, measured, outcome.throughputs, contest, self._precisions.get(config.backend))

    def _with_batches(self, config: ModelConfig, largest: int) -> ModelConfig:
        """Load the model with the largest batch up to ``largest`` that it takes; return its configuration."""
        least = config.max_batch_size
        if not least:
            return config
        while True:
            wide = dataclasses.replace(config, max_batch_size=max(largest, least))
            try:
                self._load(wide)
            except NeriteError as error:
                if largest <= least:
                    raise
                named = _LIMIT.search(error.message)
                largest = min(int(named[1]), largest - 1) if named else largest // 2
            else:
                return wide

    def _sample(self, *, batching: bool) -> Request:
        """Return random data that the model answers, and keep their shapes; the most plausible ones are tried first."""
        given = self._order.shapes
        free = variable_inputs(self._inputs, given, batching=batching)

        def ask(shapes: Mapping[str, Sizes]) -> Request:
            self._shapes = shapes
            made = self._data(int(batching))
            self._client.infer(self._model.name, made)
            return made

        try:
            shapes, made = first_answered(shapes_to_try(self._inputs, batching=batching, given=given), ask)
        except ClientError as error:
            if not free:
                raise
            advice = sizes_advice(free, batching=batching)
            raise ClientError(f"{_reason(error)}. {advice}") from error
        self._outcome.example_shapes = {
            tensor.name: shapes[tensor.name]
            for tensor in self._inputs
            if is_enlarged(tensor, shapes[tensor.name], batching=batching)
        }
        if free:
            self._outcome.remarks.append(chosen_shapes({tensor.name: shapes[tensor.name] for tensor in free}))
        return made

    def _contest(
        self, config: ModelConfig, rivals: Sequence[str], sample: Request
    ) -> tuple[ModelConfig, Sequence[Latency], ContestVerdict | None]:
        """Measure each backend; return the configuration and the latencies of the best one, and the verdict."""
        outcome = self._outcome
        loaded = self._trial.memory()
        config = self._precise(config, sample)
        own, config = self._contestant(config, sample, alone=not rivals)
        outcome.latencies = list(own.latencies)
        outcome.memory_at_work = max(0, self._trial.memory() - loaded)
        configs = {config.backend: config}
        for backend in rivals:
            try:
                # The backend completes its own platform and default number of instances.
                self._load(dataclasses.replace(config, backend=backend, platform="", instance_group=()))
                other = self._precise(from_json(self._client.config(self._model.name)), sample)
                rival, configs[backend] = self._contestant(other, sample)
                outcome.rivals.append(rival)
            except (ClientError, NeriteError) as error:
                outcome.remarks.append(f"{backend} reads files of this kind, but not this one: {_reason(error)}")
        if not outcome.rivals:
            return config, own.latencies, None
        found = contest_verdict(own, outcome.rivals)
        return configs[found.winner.backend], found.winner.latencies, found

    def _contestant(
        self, config: ModelConfig, sample: Request, *, alone: bool = False
    ) -> tuple[Contestant, ModelConfig]:
        """Measure the loaded model; return the result, and the configuration with the largest batch that succeeded."""

        def report(what: str) -> None:
            self._watcher.doing(what if alone else f"{what} with {config.backend}")

        answers = self._answers(sample)
        measured, refusal = proposal.latencies(self._client, self._model, config.max_batch_size, self._data, report)
        if refusal:
            largest = measured[-1].batch
            self._outcome.remarks.append(
                f"{config.backend} fails with batches of more than {largest}: {_reason(refusal)}"
            )
            config = dataclasses.replace(config, max_batch_size=largest)
        return Contestant(config.backend, measured, answers), config

    def _precise(self, config: ModelConfig, sample: Request) -> ModelConfig:
        """Return the configuration of a loaded model: with float32 if OpenVINO's default changes the outputs."""
        if config.backend != "openvino" or _PRECISIONS & config.parameters.keys():
            return config
        default = self._answers(sample)
        hint = {_PRECISION: ModelParameter(string_value="f32")}
        exact = dataclasses.replace(config, parameters={**config.parameters, **hint})
        self._load(exact)
        answers = self._answers(sample)
        apart = proposal.largest_difference(answers, default)
        if not apart:
            return config
        if apart <= PRECISION_TOLERANCE or proposal.largest_difference(answers, self._answers(sample)):
            # Close enough, or the outputs are random anyway.
            self._load(config)
            return config
        reason = (
            f"OpenVINO's default here is half precision (BF16 or FP16), which changes outputs by {apart:.1e} of the "
            f"largest value; more than {PRECISION_TOLERANCE:g} is not accepted unasked"
        )
        self._precisions[config.backend] = Advice(_PRECISION, "f32", reason)
        return exact

    def _rates(self, config: ModelConfig, sample: Request) -> Iterator[tuple[int, float]]:
        """Measure each number of instances repeatedly, unless the model is on GPUs; yield numbers and rates."""
        if any(group.kind == "KIND_GPU" for group in config.instance_group):
            return
        repeats = _REPEATS if self._outcome.load_seconds < _SLOW_LOAD else _REPEATS // 2
        loaded = 0
        for count in proposal.interleaved(_COUNTS, repeats):
            self._watcher.doing(f"measuring {count} instance{'s' if count > 1 else ''}")
            if count != loaded:
                groups = tuple(dataclasses.replace(group, count=count) for group in config.instance_group[:1])
                self._load(dataclasses.replace(config, instance_group=groups))
                loaded = count
            yield count, proposal.throughput(self._client, self._trial.url, self._model, sample)

    def _answers(self, sample: Request) -> Mapping[str, Array]:
        return self._client.infer(self._model.name, sample)

    def _data(self, batch: int) -> Request:
        return made_up_data(self._inputs, Shapes(batch, self._shapes))

    def _load(self, config: ModelConfig) -> None:
        load_model(self._trial, self._client, self._outcome, config)


def rivals_of(config: ModelConfig) -> list[str]:
    """Return the other installed backends that can read the model's file; none for a model on GPUs."""
    if any(group.kind == "KIND_GPU" for group in config.instance_group):
        return []
    return [backend for backend in others_with_the_file(config) if registry.is_installed(backend)]


_BENCH: Final = "Measure it on a server: nerite bench {name} --protocol openai"
_OF_TEXT: Final = f"it generates text. {_BENCH}"
_WORK: Final = {
    "image": "it generates images, which takes long",
    "audio": "it synthesizes speech, which takes long",
    "segments": "it transcribes recordings, which takes long",
    "embedding": f"it embeds texts. {_BENCH} --endpoint embeddings",
    "label": "it classifies texts, and its engine batches by itself",
    "scores": f"it reranks texts. {_BENCH} --endpoint rerank",
}
"""What models for the backend ``llm`` do, by an output that only they have, in this order."""


def _obstacle(config: ModelConfig) -> str:
    """Return the reason why a model cannot be measured on its own with random requests, or "" if it can."""
    if config.backend == LANGUAGE_MODELS:
        outputs = {tensor.name for tensor in config.output}
        return next((what for name, what in _WORK.items() if name in outputs), _OF_TEXT).format(name=config.name)
    if config.model_transaction_policy is not None and config.model_transaction_policy.decoupled:
        return "it is decoupled"
    if config.sequence_batching is not None:
        return "its requests belong to sequences"
    if config.ensemble_scheduling is not None:
        return "it is an ensemble of other models"
    return ""


_LONGEST_REASON: Final = 300
_INTRODUCTION: Final = (
    r"^.* cannot be served: (load failed for model '[^']*': )?(version \d+ is at UNAVAILABLE state: )?(Internal: )?"
)
"""What introduces each error of a load."""


def _reason(error: Exception | str) -> str:
    """Return the text of an error on one line, abbreviated, without what introduces each error of a load."""
    text = error.message if isinstance(error, NeriteError) else str(error)
    text = re.sub(_INTRODUCTION, "", " ".join(text.split()))
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} …"


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
        check_shapes(order.shapes, outcome.signature.inputs, batching=complete.max_batch_size > 0)
        if own_config:
            outcome.config = complete
        elif complete.backend == LANGUAGE_MODELS:
            # Its inputs and outputs are those of all language models, and are completed at each load.
            outcome.config = dataclasses.replace(outcome.artifact.config, backend=LANGUAGE_MODELS)
        else:
            found = {each: getattr(complete, each) for each in _COMPLETED}
            outcome.config = dataclasses.replace(outcome.artifact.config, **found)
        if order.measure:
            may_grow = not own_config and complete.backend != "python"
            largest = max(complete.max_batch_size, order.largest_batch) if may_grow else complete.max_batch_size
            rivals = [] if own_config or order.backend else rivals_of(complete)
            Examination(order, watcher, trial, client, outcome).run(complete, largest, rivals)
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
