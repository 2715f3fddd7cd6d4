"""Running a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from nerite.backends.arrays.feeds import LARGE
from nerite.backends.arrays.instance import Compute
from nerite.backends.arrays.selection import Selection
from nerite.backends.tensorflow.session import translated
from nerite.backends.tensorflow.signature import Signature
from nerite.core import dtype as dtypes
from nerite.core.tensor import Array

_Callable: TypeAlias = Callable[..., Sequence[Array]]

_MAX_CALLABLES: Final = 64
"""Ways to call a model that are remembered: one for each set of outputs, and order of inputs."""


def of_session(framework: Any, session: Any, signature: Signature) -> Compute:
    """Return the computation of a session."""
    feeds, fetches = signature.feeds, signature.fetches
    graph = signature.graph
    narrow_inputs = _narrow(graph.inputs) | _narrow(graph.defaulted)
    narrow_outputs = _narrow(graph.outputs)
    bfloat16 = framework.bfloat16.as_numpy_dtype
    callables: dict[tuple[object, ...], _Callable] = {}

    def compute(selection: Selection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        key = (selection, *inputs)
        call = callables.get(key)
        try:
            if call is None:
                if len(callables) >= _MAX_CALLABLES:
                    callables.clear()
                call = callables[key] = _callable(
                    framework, session, [feeds[name] for name in inputs], [fetches[name] for name in selection.names]
                )
            if narrow_inputs:
                inputs = {
                    name: array.view(bfloat16) if name in narrow_inputs else array for name, array in inputs.items()
                }
            arrays = call(*inputs.values())
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise translated(error) from error
        if narrow_outputs:
            arrays = [array.view(dtypes.BF16.numpy) if array.dtype == bfloat16 else array for array in arrays]
        return [_ours(array, inputs) for array in arrays]

    return compute


def _narrow(tensors: Mapping[str, Any]) -> set[str]:
    """Return the tensors of the one type that numpy does not have."""
    return {name for name, tensor in tensors.items() if tensor.datatype is dtypes.BF16}


def _ours(array: Array, inputs: Mapping[str, Array]) -> Array:
    """Return ``array``, or a copy where it may be in a buffer that the next batch is put into.

    What an operator hands through, TensorFlow does not copy, and neither what it is fed.
    """
    if array.nbytes >= LARGE and any(np.may_share_memory(array, given) for given in inputs.values()):
        return array.copy()
    return array


def _callable(framework: Any, session: Any, feeds: Sequence[str], fetches: Sequence[str]) -> _Callable:
    """Return a function from the tensors ``feeds``, in their order, to ``fetches``."""
    with session.graph.as_default():
        seen = set(feeds)
        wanted = []
        for name in fetches:
            if name in seen:
                # Nothing may be fetched twice, or fetched and fed.
                name = framework.identity(session.graph.get_tensor_by_name(name)).name
            seen.add(name)
            wanted.append(name)
        make = getattr(session, "_make_callable_from_options", None)
        if make is None:
            return session.make_callable(wanted, feed_list=list(feeds))  # type: ignore[no-any-return]
        # What lies under ``run`` and ``make_callable``, which work out anew at each call what is to be done: 0.2 ms.
        from tensorflow.core.protobuf.config_pb2 import CallableOptions

        return make(CallableOptions(feed=feeds, fetch=wanted))  # type: ignore[no-any-return]
