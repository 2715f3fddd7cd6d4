"""Whether an exported program writes into what it is given, or into what it keeps.

Its signature says so only of programs whose operations in place have been taken out. So the graph is followed: from
each operation that writes, back through views, to where the memory comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def written(graph: Any, roots: Mapping[str, str]) -> set[str]:
    """Return which of ``roots`` a graph may write into; they are names of its placeholders and what each stands for."""
    origins: dict[Any, frozenset[str]] = {}
    found: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            origins[node] = frozenset([roots[node.name]] if node.name in roots else [])
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            # Taking one of several results, or an operation with graphs of its own.
            origins[node] = _of(origins, node.all_input_nodes)
            continue
        arguments = list(_arguments(node, schema))
        for argument, values in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                found |= _of(origins, values)
        origins[node] = _of(origins, _sources(node, schema, arguments))
    return found


def _sources(node: Any, schema: Any, arguments: Iterable[tuple[Any, list[Any]]]) -> list[Any]:
    """Return the nodes whose memory the result of ``node`` may be in."""
    given = [values for argument, values in arguments if argument.alias_info is not None]
    if any(each.alias_info is not None for each in schema.returns):
        return [value for values in given for value in values]
    if torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), "CompositeImplicitAutograd"):
        # Made of others, and does not say of which: reshape or dropout may give back what they got.
        return list(node.all_input_nodes[:1])
    return []


def _arguments(node: Any, schema: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the arguments of a call as declared, each with the nodes that are passed for it."""
    for position, argument in enumerate(schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        yield argument, [each for each in _flat(value) if isinstance(each, torch.fx.Node)]


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _of(origins: Mapping[Any, frozenset[str]], nodes: Iterable[Any]) -> frozenset[str]:
    return frozenset().union(*(origins.get(node, frozenset()) for node in nodes))
