"""Models that generate images, behind a server: what comes under /v1 is what the engine's own pipeline makes."""

from __future__ import annotations

import base64
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import PIL.Image
import pytest

from nerite.llm.openvino_genai.framework import genai
from painting_models import painting_model
from serving import Serving, eventually, serving

PROMPT = "a sea snail"
PENDING = 'nv_inference_pending_request_count{model="paints",version="1"}'
GIVEN_UP = 'nerite_requests_given_up_total{model="paints",reason="disconnected",version="1"}'
CANCELED = 'nv_inference_request_failure{model="paints",reason="CANCELED",version="1"}'
SUCCESS = 'nv_inference_request_success{model="paints",version="1"}'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images") / "models"
    painting_model(made / "paints" / "1")
    return made


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Serving]:
    with serving(models, models.parent / "log") as running:
        yield running


def generated(server: Serving, **said: Any) -> list[Any]:
    """Ask for images; return the pixels of each."""
    asked = {"model": "paints", "prompt": PROMPT, "size": "64x48", "num_inference_steps": 4, **said}
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as client:
        extra = {name: asked.pop(name) for name in list(asked) if name not in ("model", "prompt", "size", "n")}
        answer = client.images.generate(**asked, extra_body=extra)
    assert answer.data is not None
    return [np.array(PIL.Image.open(io.BytesIO(base64.b64decode(each.b64_json or "")))) for each in answer.data]


@pytest.mark.feature("openvino_genai", "image generation")
def test_the_pixels_are_the_engines_own(models: Path, server: Serving) -> None:
    pipeline = genai().Text2ImagePipeline(str(models / "paints" / "1"), "CPU")

    def own(**settings: Any) -> Any:
        more = {"width": 64, "height": 48, "num_inference_steps": 4, **settings}
        return np.array(pipeline.generate(PROMPT, **more).data)[0]

    several = generated(server, n=3, seed=7)
    assert [each.shape for each in several] == [(48, 64, 3)] * 3
    for number, pixels in enumerate(several):
        assert np.array_equal(pixels, own(rng_seed=7 + number))
    (guided,) = generated(server, seed=7, guidance_scale=2.5, negative_prompt="tea")
    assert np.array_equal(guided, own(rng_seed=7, guidance_scale=2.5, negative_prompt="tea"))
    (usual,) = generated(server, seed=7, size="auto")
    assert usual.shape == (64, 64, 3)
    first, second = (generated(server)[0] for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("said", "param", "text"),
    [
        ({"prompt": PROMPT}, "model", "Missing required parameter"),
        ({"model": "paints"}, "prompt", "Missing required parameter"),
        ({"model": "paints", "prompt": ""}, "prompt", "Expected a text"),
        ({"model": "paints", "prompt": "x" * 32_001}, "prompt", "maximum length 32000"),
        ({"model": "paints", "prompt": PROMPT, "n": 11}, "n", "an integer from 1 to 10"),
        ({"model": "paints", "prompt": PROMPT, "size": "big"}, "size", "such as '512x512'"),
        ({"model": "paints", "prompt": PROMPT, "size": "4096x64"}, "size", "at most 2048"),
        ({"model": "paints", "prompt": PROMPT, "size": "60x64"}, "size", "it must be divisible by 8"),
        ({"model": "paints", "prompt": PROMPT, "response_format": "url"}, "response_format", "one of 'b64_json'"),
        ({"model": "paints", "prompt": PROMPT, "stream": True}, "stream", "when they are complete"),
        ({"model": "paints", "prompt": PROMPT, "num_inference_steps": 0}, "num_inference_steps", "from 1 to 500"),
    ],
)
def test_what_is_refused(server: Serving, said: dict[str, Any], param: str, text: str) -> None:
    status, _, body = server.ask("POST", "/v1/images/generations", said)
    error = json.loads(body)["error"]
    assert (status, error["param"]) == (400, param), error
    assert text in error["message"]


def test_a_client_that_goes_away(server: Serving) -> None:
    """An image of many steps is given up before its end, and that of another client follows."""

    def post(steps: int) -> socket.socket:
        asked = {"model": "paints", "prompt": PROMPT, "size": "2048x2048", "num_inference_steps": steps}
        body = json.dumps(asked).encode()
        head = f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        host, port = server.http.split(":")
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head.encode() + body)
        return connection

    before = server.metrics()
    with post(500) as first, post(1) as second:
        eventually(lambda: server.metrics()[PENDING] == 1)
        first.close()
        assert second.recv(15) == b"HTTP/1.1 200 OK"
    after = server.metrics()
    assert [after[name] - before[name] for name in (GIVEN_UP, CANCELED, SUCCESS)] == [1, 1, 1]


def test_the_models_own_tensors(server: Serving) -> None:
    asked = {"text_input": PROMPT, "width": 64, "height": 64, "num_inference_steps": 2, "seed": 1}
    status, _, body = server.ask("POST", "/v2/models/paints/infer", infer(asked))
    assert status == 200, body
    assert b"PNG" in body


def infer(given: dict[str, Any]) -> dict[str, Any]:
    types = {"text_input": "BYTES", "seed": "INT64"}
    inputs = [
        {"name": name, "datatype": types.get(name, "INT32"), "shape": [1], "data": [value]}
        for name, value in given.items()
    ]
    return {"inputs": inputs, "parameters": {"binary_data_output": True}}
