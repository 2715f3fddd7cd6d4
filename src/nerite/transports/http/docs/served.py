"""The model versions that take requests, as the documentation needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from nerite.core.signature import Input, Output, Signature, show

if TYPE_CHECKING:
    from nerite.repository.model_record import ModelRecord

_IN_A_PATH = "!$&'()*+,;=:@~"


class Served(NamedTuple):
    """A version of a model."""

    model: str
    version: str
    latest: bool
    """Requests that name no version come here."""
    platform: str
    signature: Signature
    decoupled: bool
    """A request has any number of responses."""

    @property
    def endpoint(self) -> str:
        """The endpoint for its inferences."""
        return "generate_stream" if self.decoupled else "infer"

    @property
    def paths(self) -> list[str]:
        """The paths of that endpoint, the shortest first; none if the model's name cannot stand in a URL."""
        if quote(self.model, safe=_IN_A_PATH) != self.model:  # names in paths are taken as they are written
            return []
        model = f"/v2/models/{self.model}"
        shortest = [f"{model}/{self.endpoint}"] if self.latest else []
        return [*shortest, f"{model}/versions/{self.version}/{self.endpoint}"]

    def tensors(self) -> Iterator[tuple[str, Input | Output]]:
        """Yield what goes in and what comes out, each with a word for it."""
        for declared in self.signature.inputs.values():
            yield "optional input" if declared.optional else "input", declared
        for output in self.signature.outputs.values():
            yield "output", output

    def shape(self, declared: Input | Output) -> str:
        """Return a shape as metadata has it: -1 is any size, and the first is the batch if there are batches."""
        return show((-1, *declared.dims) if self.signature.max_batch_size else declared.dims)


def served_by(records: Iterable[ModelRecord]) -> list[Served]:
    """Return every version that runs, by model and number.

    Models that share a name, each in its namespace, are left out: a request cannot say which it means.
    """
    running = [record for record in records if record.running]
    names = Counter(record.name for record in running)
    return [
        Served(
            record.name,
            version.label,
            number == record.latest,
            version.config.platform or version.config.backend,
            version.signature,
            version.decoupled,
        )
        for record in running
        if names[record.name] == 1
        for number, version in sorted(record.running.items())
    ]
