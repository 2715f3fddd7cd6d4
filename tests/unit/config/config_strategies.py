"""Random configurations of every shape that the schema allows."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from nerite.config.model_config import ModelConfig
from nerite.config.schema import BOUNDS, FieldSchema, MessageSchema, schema_of, single

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def scalars(declared: FieldSchema) -> st.SearchStrategy[Any]:
    if declared.kind in BOUNDS:
        smallest, largest = BOUNDS[declared.kind]
        return st.sampled_from([0, 1, smallest, largest]) | st.integers(smallest, largest)
    if declared.kind == "enum":
        return st.sampled_from(declared.values)
    if declared.kind == "bool":
        return st.booleans()
    if declared.kind == "string":
        return TEXTS
    numbers = st.floats(allow_nan=False)
    return numbers.map(single) if declared.kind == "float" else numbers


def values(declared: FieldSchema) -> st.SearchStrategy[Any]:
    one = messages(declared.message) if declared.kind == "message" else scalars(declared)
    if declared.key is not None:
        return st.dictionaries(scalars(declared.entry.fields["key"]), one, max_size=2)
    return st.lists(one, max_size=2).map(tuple) if declared.repeated else one


@st.composite
def _message(draw: st.DrawFn, schema: MessageSchema) -> Any:
    names = draw(st.lists(st.sampled_from(list(schema.fields)), unique=True, max_size=3)) if schema.fields else []
    arguments: dict[str, Any] = {}
    for name in names:
        declared = schema.fields[name]
        if not any(rival in arguments for rival in declared.rivals):
            arguments[name] = draw(values(declared))
    return schema.make(arguments)


def messages(schema: MessageSchema) -> st.SearchStrategy[Any]:
    return st.deferred(lambda: _message(schema))


def configs() -> st.SearchStrategy[ModelConfig]:
    return messages(schema_of())
