"""The OpenAPI document and the page: complete, valid, and with samples that signatures accept."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from nerite.core import tensor as dtypes
from nerite.core.request import RequestHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import DataType, TensorSpec
from nerite.repository.catalogue import ModelRecord
from nerite.transports.http.openapi import ServedModel, openapi_document, sample_inputs, sample_of, served_models
from nerite.transports.http.openapi_schemas import COMMON
from nerite.transports.http.routes import ARGUMENTS, ENDPOINT_DESCRIPTIONS
from nerite.transports.http.routes import ENDPOINTS as ROUTES
from nerite.transports.http.web_pages import DOCS_POLICY, docs_page

URL = "http://here:8000"


def signature(datatype: DataType, *shapes: tuple[int, ...], batch: int = 0, optional: bool = False) -> Signature:
    names = [f"IN{number}" for number in range(len(shapes))]
    inputs = [SignatureInput(name, datatype, dims, optional) for name, dims in zip(names, shapes, strict=True)]
    return Signature("m", batch, inputs, [SignatureOutput("OUT", datatype, (1,))])


def served(of: Signature, model: str = "m", *, decoupled: bool = False, latest: bool = True) -> ServedModel:
    return ServedModel(model, "3", latest, "python", of, decoupled)


PLAIN = served(signature(dtypes.FP32, (1,), batch=8))
TOKENS = served(Signature("m", 8, [SignatureInput(name, dtypes.INT64, (-1,)) for name in ("ids", "ids_mask")], []))
PICTURE = served(signature(dtypes.UINT8, (-1, -1, 3)), "picture")
STREAM = served(signature(dtypes.BYTES, (1,)), "stream", decoupled=True)


def made(*each: ServedModel, **key_headers: str) -> dict[str, Any]:
    return openapi_document(each, key_headers, URL)


def test_every_endpoint_of_the_table_is_told() -> None:
    assert ENDPOINT_DESCRIPTIONS.keys() == {route.name for route in ROUTES}
    paths = made()["paths"]
    assert {(path, method) for path, methods in paths.items() for method in methods} == {
        (path, method.lower()) for route in ROUTES for path in route.paths for method in route.methods
    }
    assert ARGUMENTS.keys() == {name for path in paths for name in re.findall(r"\{(\w+)\}", path)}


@pytest.mark.parametrize("locked", [{}, {"inference": "X-Key", "health": "X-Other"}])
def test_the_document_is_valid(locked: dict[str, str]) -> None:
    everything = [served(of, f"model_{number}") for number, of in enumerate(SIGNATURES.values())]
    validate(json.loads(json.dumps(made(*everything, STREAM, **locked))))


def test_every_name_of_a_schema_is_one() -> None:
    named = {name for told in ENDPOINT_DESCRIPTIONS.values() for name in (told.takes, told.gives) if name}
    assert named <= COMMON.keys()


def test_operations_have_names_of_their_own() -> None:
    operations = [operation for methods in made(PLAIN, STREAM)["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert {"infer", "infer_version", "load_repository", "logging_get", "m.infer", "m.versions.3.infer"} <= set(names)


def test_paths_of_models() -> None:
    older = served(signature(dtypes.FP32, (2,)), latest=False)._replace(version="1")
    unreachable = served(signature(dtypes.FP32, (2,)), "a b/ü")
    paths = [path for path in made(PLAIN, older, STREAM, unreachable)["paths"] if "{" not in path]
    assert [path for path in paths if path.endswith(("/infer", "/generate_stream"))] == [
        "/v2/models/m/infer",
        "/v2/models/m/versions/3/infer",
        "/v2/models/m/versions/1/infer",
        "/v2/models/stream/generate_stream",
        "/v2/models/stream/versions/3/generate_stream",
    ]


def test_models_that_a_request_cannot_tell_apart_are_left_out() -> None:
    def record(name: str, namespace: str, *versions: int) -> ModelRecord:
        def running(version: int) -> Any:
            config = SimpleNamespace(platform="", backend="python")
            return SimpleNamespace(label=str(version), config=config, signature=PLAIN.signature, decoupled=False)

        found = {version: running(version) for version in versions}
        return ModelRecord(name, namespace, running=found, latest=max(versions, default=-1))

    records = [record("a", "one", 2, 10), record("a", "two"), record("b", "one", 1), record("b", "two", 1)]
    assert [(each.model, each.version, each.latest) for each in served_models(records)] == [
        ("a", "2", False),
        ("a", "10", True),
    ]


def test_what_a_model_takes() -> None:
    operation = made(PLAIN)["paths"]["/v2/models/m/infer"]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    tensor = {"name": "IN0", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}
    assert content["example"] == {"inputs": [tensor]}
    assert "| input | `IN0` | FP32 | [-1,1] |" in operation["description"]
    assert "of up to 8" in operation["description"]
    (sample,) = operation["x-codeSamples"]
    assert sample["source"] == f"curl {URL}/v2/models/m/infer -d '{json.dumps(content['example'])}'"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "IN1"},
        {"datatype": "FP64"},
        {"shape": [9, 1]},
        {"shape": [1]},
        {"shape": [0, 1]},
        {"data": ["text"]},
        {"data": [[0.0], True]},
    ],
)
def test_what_a_model_does_not_take(change: dict[str, Any]) -> None:
    found = made(PLAIN)
    schema = found["paths"]["/v2/models/m/infer"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": found["components"]})
    tensor = {"name": "IN0", "datatype": "FP32", "shape": [2, 1], "data": [[0.0], [1]]}
    validator.validate({"inputs": [tensor]})
    assert not validator.is_valid({"inputs": [tensor | change]})


SIGNATURES = {
    **{datatype.name: signature(datatype, (-1, 2), batch=4) for datatype in dtypes.ALL},
    "no dimension": signature(dtypes.INT64, ()),
    "a large one": signature(dtypes.FP32, (3, 224, 224)),
    "large texts": signature(dtypes.BYTES, (100,), batch=1),
    "several": signature(dtypes.INT8, (1,), (-1, -1), (40,), batch=2),
    "a picture of any size": signature(dtypes.FP32, (3, -1, -1), batch=2),
    "an optional one": signature(dtypes.INT8, (1,), optional=True),
    "none": signature(dtypes.INT8),
}


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_samples_are_what_the_signature_takes(name: str, decoupled: bool) -> None:
    of = SIGNATURES[name]
    found = made(served(of, decoupled=decoupled))
    path = f"/v2/models/m/{'generate_stream' if decoupled else 'infer'}"
    content = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    sample = sample_of(of, decoupled=decoupled)
    if sample is None:
        assert decoupled and name in ("FP16", "BF16", "a large one")
        assert "use gRPC" in found["paths"][path]["post"]["description"]
        return
    Draft202012Validator({**content["schema"], "components": found["components"]}).validate(sample.body)
    assert ("example" in content) is not bool(sample.zeros)
    if not decoupled:
        specs = [
            TensorSpec(each["name"], dtypes.BY_NAME[each["datatype"]], tuple(each["shape"]))
            for each in sample.body["inputs"]
        ]
        of.bind(RequestHeader("m", "", specs))


def test_a_command_with_bytes_behind_the_json() -> None:
    sample = sample_of(signature(dtypes.FP16, (2,)), decoupled=False)
    assert sample is not None
    assert (sample.zeros, sample.binary, sample.brief) == (4, True, False)
    text = (
        '{"inputs": [{"name": "IN0", "datatype": "FP16", "shape": [2], "parameters": {"binary_data_size": 4}}], '
        '"parameters": {"binary_data_output": true}}'
    )
    assert sample.curl("http://[::1]:8000/m") == (
        f"(printf %s '{text}'; head -c 4 /dev/zero) | curl 'http://[::1]:8000/m' --output answer.bin "
        f"-H 'Inference-Header-Content-Length: {len(text)}' --data-binary @-"
    )


def test_samples_have_plausible_sizes() -> None:
    tokens = sample_of(TOKENS.signature, decoupled=False)
    assert tokens is not None
    assert [(each["shape"], set(each["data"])) for each in tokens.body["inputs"]] == [([1, 128], {0}), ([1, 128], {1})]
    assert sample_inputs(TOKENS.signature, decoupled=False)["ids_mask"] == ((1, 128), str([1] * 128))
    assert sample_inputs(TOKENS.signature, decoupled=True)["ids_mask"] == ((1, 1), "[1]")
    picture = sample_of(PICTURE.signature, decoupled=False)
    assert picture is not None
    assert (picture.body["inputs"][0]["shape"], picture.zeros) == ([224, 224, 3], 224 * 224 * 3)


def test_keys() -> None:
    found = made(PLAIN, inference="X-Key", metrics="X-Metrics")
    assert found["components"]["securitySchemes"] == {
        "inference": {"type": "apiKey", "in": "header", "name": "X-Key"},
        "metrics": {"type": "apiKey", "in": "header", "name": "X-Metrics"},
    }
    for path in ("/v2/models/m/infer", "/v2/models/{model}/infer"):
        assert found["paths"][path]["post"]["security"] == [{"inference": []}]
    assert "security" not in found["paths"]["/v2"]["get"]
    (sample,) = found["paths"]["/v2/models/m/infer"]["post"]["x-codeSamples"]
    assert """-H 'X-Key: '"$KEY" -d""" in sample["source"]


def test_the_page() -> None:
    unreachable = served(signature(dtypes.FP32, (2,)), "<b>&")
    half = served(signature(dtypes.FP16, (2,)), "half", decoupled=True)
    idle = [("broken", "1", "UNAVAILABLE"), ("waiting", "", "")]
    text = docs_page("my <server>", [PLAIN, STREAM, unreachable, half], idle, {"inference": "X-Key"}, URL)
    assert "<title>my &lt;server&gt;: models" in text
    assert "&lt;b&gt;&amp;" in text and "<b>" not in text
    assert "The name of this model is not valid in a URL path" in text
    assert "No sample command" in text
    assert '<input name="X-Key">' in text
    assert "<td class=UNAVAILABLE>UNAVAILABLE" in text and "not loaded" in text
    assert 'action="/v2/models/m/infer"' in text
    for route in ROUTES:
        assert f"<code>{route.path}</code>" in text
    # It asks nobody but its own server.
    assert re.findall(r"(?:src|href)=.([^\s>]*)\"", text) == ["/v2/docs/openapi.json"]
    assert "default-src 'none'" in DOCS_POLICY


def test_models_are_open_where_they_are_few() -> None:
    assert docs_page("s", [PLAIN], [], {}, URL).count("<details open>") == 1
    many = [PLAIN._replace(model=f"m{number}") for number in range(4)]
    text = docs_page("s", many, [], {}, URL)
    assert (text.count("<details>"), text.count("<details open>")) == (4, 0)
