"""The models as a front knows them: their names, the states of their versions, and the signatures of those that run.

The core describes each model, and sends the descriptions that have changed. A front keeps them in a ``Catalogue`` like
the core's own, so unknown and unready models are refused with the same texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

from nerite.core import tensor as dtypes
from nerite.core.request import CancelReason, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.fronts.core_connection import CoreConnection
from nerite.models.running_version import RunningVersion
from nerite.repository.catalogue import Catalogue, ModelRecord
from nerite.repository.version_state import ModelState, VersionState

Description: TypeAlias = dict[str, Any]


def signature_to_json(signature: Signature) -> dict[str, Any]:
    """Return the JSON form of a signature."""
    return {
        "model": signature.model_name,
        "rows": signature.max_batch_size,
        "inputs": [
            [each.name, each.datatype.name, each.dims, each.optional, each.ragged, each.reshape]
            for each in signature.inputs.values()
        ],
        "outputs": [
            [each.name, each.datatype.name, each.dims, each.labels, each.reshape] for each in signature.outputs.values()
        ],
    }


def signature_from_json(value: dict[str, Any]) -> Signature:
    """Return the signature that ``signature_to_json`` was given."""
    inputs = [
        SignatureInput(name, dtypes.BY_NAME[datatype], tuple(dims), optional, ragged, _shape(reshape))
        for name, datatype, dims, optional, ragged, reshape in value["inputs"]
    ]
    outputs = [
        SignatureOutput(name, dtypes.BY_NAME[datatype], tuple(dims), tuple(labels), _shape(reshape))
        for name, datatype, dims, labels, reshape in value["outputs"]
    ]
    return Signature(value["model"], value["rows"], inputs, outputs)


def _shape(given: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if given is None else tuple(given)


class CatalogueWriter:
    """The core's side: describes models, and finds the descriptions that have changed."""

    def __init__(self) -> None:
        self._described: dict[tuple[str, str], Description] = {}
        self._signatures: dict[int, dict[str, Any]] = {}
        """Signatures in JSON, by the number of the running version."""

    def everything(self) -> list[Description]:
        """Return all descriptions, as of the last call of ``changes``."""
        return list(self._described.values())

    def changes(self, records: Iterable[ModelRecord]) -> list[Description]:
        """Return the descriptions that have changed since the last call."""
        described = {(record.namespace, record.name): self._describe(record) for record in records if record.known}
        changed = [each for key, each in described.items() if self._described.get(key) != each]
        changed += [
            {"namespace": key[0], "name": key[1], "states": {}, "running": {}, "latest": -1}
            for key in self._described
            if key not in described
        ]
        self._described = described
        running = {version["number"] for each in described.values() for version in each["running"].values()}
        self._signatures = {number: each for number, each in self._signatures.items() if number in running}
        return changed

    def _describe(self, record: ModelRecord) -> Description:
        return {
            "namespace": record.namespace,
            "name": record.name,
            "states": {version: [state.state.value, state.reason] for version, state in record.states.items()},
            "running": {version: self._version(record, running) for version, running in record.running.items()},
            "latest": record.latest,
            "on_demand": record.on_demand,
            "text_task": record.text_task,
            "retry_after": record.retry_after,
        }

    def _version(self, record: ModelRecord, running: RunningVersion) -> dict[str, Any]:
        signature = self._signatures.get(running.number)
        if signature is None:
            signature = self._signatures[running.number] = signature_to_json(running.signature)
        return {
            "number": running.number,
            "decoupled": running.decoupled,
            "generates": running.generates,
            "stream_input": running.stream_input,
            "usable": running.usable,
            "adapters": sorted(running.runtime_adapters),
            "parameters": {name: running.parameter(name) for name in running.config_json.get("parameters", {})},
            "directory": "" if record.loaded is None else str(record.loaded.polled.directory / running.label),
            "signature": signature,
        }


class FrontVersion:
    """A running model version as a front sees it: requests to it go to the core."""

    def __init__(self, name: str, version: int, description: dict[str, Any], core: CoreConnection) -> None:
        self.name = name
        self.version = version
        self.label = str(version)
        self.number: int = description["number"]
        """Unique among all versions that the core loads."""
        self.decoupled: bool = description["decoupled"]
        self.generates: bool = description["generates"]
        self.stream_input: str = description["stream_input"]
        self.usable: bool = description["usable"]
        """Whether an instance can run requests."""
        self.runtime_adapters: list[str] = description["adapters"]
        """Names of the LoRA adapters that were loaded since the version was."""
        self.directory: str = description["directory"]
        """Directory of its files; empty if it has none."""
        self._parameters: dict[str, str] = description["parameters"]
        self.signature = signature_from_json(description["signature"])
        self._core = core

    def submit(self, request: InferenceRequest) -> None:
        """Send a request to the core; its responses go through ``respond``."""
        if [*map(len, request.data)] != request.header.sizes:
            wrong = self.signature.check_data(request)
            if wrong is not None:
                request.respond(InferenceResponse.failed(wrong))
                return
        self._core.call(request)

    def enqueue(self, requests: Iterable[InferenceRequest]) -> None:
        """Send requests to the core whose data were checked before."""
        for request in requests:
            self._core.call(request)

    def parameter(self, name: str) -> str:
        """Return a parameter of the model's configuration; empty if it has none of that name."""
        return self._parameters.get(name, "")

    def given_up(self, why: CancelReason) -> None:
        """Note why the request is cancelled that is cancelled next. The core counts it."""
        self._core.cancel_reason = why

    def traced_one(self, whole_ns: int, trace_id: int, at: int) -> None:
        """Do nothing: the core traces."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return nothing: the core knows what a request waits for."""
        return ()

    def begun(self, request: InferenceRequest) -> bool:
        """Return False: the core knows which requests run."""
        return False

    def receive_buffer(self, size: int) -> memoryview | None:
        """Return shared memory that the core and all workers can map; None if there is none left."""
        return self._core.receive_buffer(size)


def follow(catalogue: Catalogue, descriptions: Iterable[Description], core: CoreConnection) -> None:
    """Change a front's catalogue to what the core describes."""
    for each in descriptions:
        record = catalogue.open(each["namespace"], each["name"])
        if not each["states"]:
            catalogue.forget(record)
            continue
        record.states = {
            version: VersionState(ModelState(state), reason) for version, (state, reason) in each["states"].items()
        }
        record.latest = each["latest"]
        record.on_demand, record.text_task = each["on_demand"], each["text_task"]
        record.retry_after = each["retry_after"]
        before = cast(dict[int, FrontVersion], record.running)
        running = {}
        for version, described in each["running"].items():
            known = before.get(version)
            if known is None or known.number != described["number"]:
                known = FrontVersion(each["name"], version, described, core)
            known.usable, known.runtime_adapters = described["usable"], described["adapters"]
            running[version] = known
        # The catalogue is typed for the core's versions; of them a front uses what is in ``ServableVersion``.
        record.running = cast(dict[int, RunningVersion], running)
