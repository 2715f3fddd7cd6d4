"""Models that sort texts into classes, behind a server: under /v1 in vLLM's format, and on their own tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nerite.frameworks.openvino.graph import openvino
from nerite.llm.openvino_genai.framework import tokenizer
from reading_models import classifying_model, reranking_model
from serving import Serving, python_model, serving

LABELS = ("calm", "glad", "sad")
TEXTS = ["one", "a longer text, with more tokens than the others", "two"]
COUNTS = """
def execute(self, requests):
    answers = []
    for request in requests:
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
        scores = np.array([[len(text) % 2, 0.5] for text in texts], np.float32)
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("scores", scores)]))
    return answers
"""
COUNTS_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
instance_group [{ kind: KIND_CPU }]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("classes")
    models = folder / "models"
    classifying_model(models / "moods" / "1", *LABELS)
    classifying_model(models / "topics" / "1", *LABELS, problem_type="multi_label_classification")
    reranking_model(models / "rates" / "1")
    counts = python_model(models, "counts", COUNTS, COUNTS_CONFIG)
    (counts / "labels.txt").write_text("odd\neven\n")
    with serving(models, folder / "log") as running:
        running.folder = models  # type: ignore[attr-defined]
        yield running


def classify(server: Serving, path: str = "/v1/classify", **said: Any) -> tuple[int, Any]:
    status, _, body = server.ask("POST", path, said)
    return status, json.loads(body)


def logits(server: Serving, model: str, text: str) -> Any:
    """What the network says by itself about a text that is alone."""
    directory = server.folder / model / "1"  # type: ignore[attr-defined]
    tokens = tokenizer(directory).encode([text])
    network = openvino().Core().compile_model(str(directory / "openvino_model.xml"), "CPU")
    return network({"input_ids": tokens.input_ids.data, "attention_mask": tokens.attention_mask.data})["logits"][0]


@pytest.mark.feature("openvino_genai", "classification")
def test_classes(server: Serving) -> None:
    status, answer = classify(server, model="moods", input=TEXTS)
    assert status == 200, answer
    assert (answer["object"], answer["model"], answer["id"][:9]) == ("list", "moods", "classify-")
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    for text, each in zip(TEXTS, answer["data"], strict=True):
        powers = np.exp(logits(server, "moods", text))
        assert each["probs"] == pytest.approx((powers / powers.sum()).tolist(), abs=1e-3)
        assert (each["label"], each["num_classes"]) == (LABELS[int(np.argmax(powers))], 3)
    tokens = sum(map(len, TEXTS))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (tokens, tokens)
    assert (
        classify(server, "/classify", model="moods", input="one")[1]["data"][0]["label"] == answer["data"][0]["label"]
    )


def test_a_text_of_several_classes(server: Serving) -> None:
    _, answer = classify(server, model="topics", input="one")
    expected = 1 / (1 + np.exp(-logits(server, "topics", "one")))
    assert answer["data"][0]["probs"] == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_model_of_another_backend(server: Serving) -> None:
    """As ``nerite add`` writes them: an input 'text', an output 'scores', and a file with labels."""
    _, answer = classify(server, model="counts", input=["abc", "ab"])
    assert [(each["label"], each["probs"]) for each in answer["data"]] == [("odd", [1.0, 0.5]), ("even", [0.0, 0.5])]
    names = {each["id"] for each in server.json("GET", "/v1/models")["data"]}
    assert {"moods", "topics", "counts", "rates"} <= names


def test_many_texts_are_batched(server: Serving) -> None:
    status, answer = classify(server, model="moods", input=[f"text {number}" for number in range(500)])
    assert (status, len(answer["data"])) == (200, 500)
    assert server.metrics()['nv_inference_exec_count{model="moods",version="1"}'] < 500


@pytest.mark.parametrize(
    ("said", "status", "param"),
    [
        ({"input": "a"}, 400, "model"),
        ({"model": "moods"}, 400, "input"),
        ({"model": "moods", "input": []}, 400, "input"),
        ({"model": "moods", "input": [1, 2]}, 400, "input"),
        ({"model": "moods", "input": "a", "use_activation": False}, 400, "use_activation"),
        ({"model": "moods", "input": ["a"] * 1025}, 400, "input"),
        ({"model": "moods", "input": "x" * 600}, 400, "input"),
        ({"model": "rates", "input": "a"}, 400, "model"),
        ({"model": "none", "input": "a"}, 404, "model"),
    ],
)
def test_what_is_refused(server: Serving, said: dict[str, Any], status: int, param: str | None) -> None:
    got, answer = classify(server, **said)
    assert (got, answer["error"]["param"]) == (status, param), answer


def test_the_models_own_tensors(server: Serving) -> None:
    status, _, body = server.ask("POST", "/v2/models/moods/generate", {"text_input": "one"})
    answer = json.loads(body)
    assert (status, len(answer["scores"]), answer["num_input_tokens"]) == (200, 3, 3)
    assert answer["label"] in LABELS
