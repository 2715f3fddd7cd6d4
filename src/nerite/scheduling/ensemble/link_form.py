"""Links as JSON: how they cross to a worker."""

from __future__ import annotations

from typing import Any

from nerite.core import dtype as dtypes
from nerite.core.signature import Input, Output, Signature
from nerite.scheduling.ensemble.link import Link, Source


def describe(link: Link) -> dict[str, Any]:
    """Return a link as JSON."""
    model = link.signature
    return {
        **link._asdict(),
        "signature": [
            model.model_name,
            model.max_batch_size,
            [(each.name, each.datatype.name, each.dims, each.optional, each.ragged) for each in model.inputs.values()],
            [(each.name, each.datatype.name, each.dims) for each in model.outputs.values()],
        ],
    }


def read(value: dict[str, Any]) -> Link:
    """Return the link that ``describe`` was given."""
    name, max_batch_size, inputs, outputs = value["signature"]
    signature = Signature(
        name,
        max_batch_size,
        [Input(name, dtypes.BY_NAME[datatype], tuple(dims), *rest) for name, datatype, dims, *rest in inputs],
        [Output(name, dtypes.BY_NAME[datatype], tuple(dims)) for name, datatype, dims in outputs],
    )
    sources = tuple(Source(*each) for each in value["sources"])
    return Link(**{**value, "signature": signature, "sources": sources, "outputs": tuple(value["outputs"])})
