"""Whether a declared tensor says what the model says of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nerite.backends.arrays.graph import GraphTensor
from nerite.backends.configuration import model_dims
from nerite.core.errors import InvalidArgument
from nerite.core.signature import show


def check_optional(name: str, entry: Mapping[str, Any], max_batch_size: int) -> None:
    """Refuse an optional input of a model that makes batches."""
    if entry.get("optional") and max_batch_size != 0:
        raise InvalidArgument(
            f"unable to load model '{name}', optional input '{entry['name']}' is not supported for models that "
            "support batching"
        )


def scattered_outputs(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the outputs that are flat in the model, and cut up for its callers: no dims say how."""
    return frozenset(target for each in config.get("batch_output", ()) for target in each["target_name"])


def find(entry: str, allowed: Mapping[str, GraphTensor], side: str) -> GraphTensor:
    """Return the tensor that is called ``entry``. ``side`` is ``input`` or ``output``."""
    if entry not in allowed:
        raise InvalidArgument(
            f"unexpected inference {side} '{entry}', allowed {side}s are: {', '.join(sorted(allowed))}"
        )
    return allowed[entry]


def check_datatype(name: str, entry: Mapping[str, Any], tensor: GraphTensor, side: str) -> None:
    """Compare data types. ``side`` says what the tensor is, in words."""
    if entry["data_type"] != tensor.datatype.config_name:
        # The model's side is named as on the wire, where a string is BYTES; the remedy as in config.pbtxt.
        text = (
            f"unable to load model '{name}', configuration expects datatype {entry['data_type']} for {side} "
            f"'{tensor.name}', model provides TYPE_{tensor.datatype.name}"
        )
        raise InvalidArgument(f"{text}. Set data_type: {tensor.datatype.config_name}")


def check_dims(name: str, entry: Mapping[str, Any], tensor: GraphTensor, max_batch_size: int, *, exact: bool) -> None:
    """Compare shapes. ``exact``: a free dimension of the model (-1) has to be free in the configuration too."""
    reshape = entry.get("reshape")
    dims = model_dims(entry)
    if max_batch_size == 0:
        if not tensor.dims:
            _check_scalar(name, tensor, dims)
        elif not _fits(tensor.dims, dims, exact):
            raise InvalidArgument(
                f"model '{name}', tensor '{tensor.name}': the model expects {len(tensor.dims)} dimensions (shape "
                f"{show(tensor.dims)}) but the model configuration specifies {len(dims)} dimensions (shape "
                f"{show(dims)}). {_remedy(reshape, tensor.dims)}"
            )
        return
    if tensor.dims[:1] != (-1,):
        raise InvalidArgument(
            f"model '{name}', tensor '{tensor.name}': for the model to support batching the shape should have at least "
            "1 dimension and the first dimension must be -1; but shape expected by the model is "
            f"{show(tensor.dims)}. Export the model with a dynamic first dimension, or set max_batch_size: 0 and "
            f"dims: {list(tensor.dims) or [1]}"
        )
    full = (-1, *dims)
    if not _fits(tensor.dims, full, exact):
        raise InvalidArgument(
            f"model '{name}', tensor '{tensor.name}': the model expects {len(tensor.dims)} dimensions (shape "
            f"{show(tensor.dims)}) but the model configuration specifies {len(full)} dimensions (an initial batch "
            "dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete shape "
            f"{show(full)}). {_remedy(reshape, tensor.dims[1:])}"
        )


def _remedy(reshape: object, dims: Sequence[int]) -> str:
    if not dims:
        return "Set dims: [1] and reshape: { shape: [] }"
    return f"Set {'dims: ' if reshape is None else 'reshape: { shape: '}{list(dims)}{'' if reshape is None else ' }'}"


def _fits(model: Sequence[int], dims: Sequence[int], exact: bool) -> bool:
    return len(model) == len(dims) and all(
        want == have or (want == -1 and not exact) for want, have in zip(model, dims, strict=True)
    )


def _check_scalar(name: str, tensor: GraphTensor, dims: Iterable[int]) -> None:
    if any(dim != 1 for dim in dims):
        raise InvalidArgument(
            f"unable to load model '{name}', scalar tensor '{tensor.name}', should only provide 1 in the model "
            f"configuration when the model doesn't support batching. Model configuration provided: {show(dims)}."
        )
