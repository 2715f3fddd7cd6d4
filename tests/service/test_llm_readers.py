"""Models that read, behind a server: embeddings and reranking, on their own tensors and under /v1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from llm_models import language_model
from reading_models import WIDTH, embedding_model, reranking_model
from serving import Serving, serving

MEAN = 'backend: "llm"\nparameters { key: "POOLING_TYPE" value { string_value: "MEAN" } }\n'
NARROW = 'backend: "llm"\nmax_batch_size: 1\nparameters { key: "NORMALIZE" value { string_value: "false" } }\n'
NAMED = 'backend: "llm"\nparameters { key: "TASK" value { string_value: "embed" } }\n'
TEXTS = ["one", "a longer text, with more tokens than the others", "two"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("readers")
    models = folder / "models"
    for name, config in (("vectors", MEAN), ("narrow", NARROW), ("named", NAMED), ("rates", ""), ("writes", "")):
        (models / name).mkdir(parents=True)
        if config:
            (models / name / "config.pbtxt").write_text(config)
    embedding_model(models / "vectors" / "1")
    embedding_model(models / "narrow" / "1", longest=16)
    embedding_model(models / "named" / "1", architectures=["OwnForCausalLM"])
    pooling = models / "named" / "1" / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text('{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}')
    reranking_model(models / "rates" / "1")
    written = language_model(folder / "written")
    for file in written.glob("openvino_detokenizer.*"):
        shutil.copy(file, models / "vectors" / "1")
    language_model(models / "writes" / "1")
    with serving(models, folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0) as made:
        yield made


def generate(server: Serving, model: str, **said: Any) -> tuple[int, Any]:
    status, _, body = server.ask("POST", f"/v2/models/{model}/generate", said)
    return status, json.loads(body)


def rerank(server: Serving, **said: Any) -> tuple[int, Any]:
    status, _, body = server.ask("POST", "/v1/rerank", {"model": "rates", **said})
    return status, json.loads(body)


@pytest.mark.feature("openvino_genai", "embeddings")
def test_embeddings(server: Serving, client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="vectors", input=TEXTS)
    vectors = np.array([each.embedding for each in made.data])
    assert vectors.shape == (3, WIDTH)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    assert made.usage.prompt_tokens == sum(map(len, TEXTS))
    # Each is what it is alone, however long the others are.
    for text, vector in zip(TEXTS, vectors, strict=True):
        alone = client.embeddings.create(model="vectors", input=text, dimensions=WIDTH)
        assert alone.data[0].embedding == pytest.approx(vector, abs=1e-5)
    same = client.embeddings.create(model="named", input=TEXTS)
    assert np.array([each.embedding for each in same.data]) == pytest.approx(vectors, abs=1e-5)


def test_requests_are_batched(server: Serving) -> None:
    config = server.json("GET", "/v2/models/vectors/config")
    assert (config["max_batch_size"], "dynamic_batching" in config) == (32, True)
    with ThreadPoolExecutor(16) as callers:
        answers = list(callers.map(lambda number: generate(server, "vectors", text_input=f"text {number}"), range(64)))
    assert {status for status, _ in answers} == {200}
    for number, (_, answer) in enumerate(answers):
        _, alone = generate(server, "vectors", text_input=f"text {number}")
        assert answer["embedding"] == pytest.approx(alone["embedding"], abs=1e-5)
    assert server.metrics()['nv_inference_exec_count{model="vectors",version="1"}'] < 64 * 2 + 10


def test_an_embedding_request_of_tritons_vllm_backend(server: Serving) -> None:
    _, plain = generate(server, "vectors", text_input="one")
    assert plain["num_input_tokens"] == 3
    asked = {"input": "one", "pooling_params": {"dimensions": [4]}}
    status, answer = generate(server, "vectors", embedding_request=json.dumps(asked), return_num_output_tokens=True)
    assert status == 200
    shorter = np.array(plain["embedding"][:4])
    assert json.loads(answer["text_output"]) == pytest.approx(shorter / np.linalg.norm(shorter), abs=1e-6)
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (3, 0)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({}, "set exactly one of the inputs 'text_input' and 'embedding_request'"),
        ({"text_input": "a", "embedding_request": "{}"}, "set exactly one of the inputs"),
        ({"text_input": ""}, "the text is empty"),
        ({"text_input": "seventeen letters"}, "the text has 17 tokens, but the model takes 16"),
        ({"embedding_request": "{"}, "'embedding_request' is not valid JSON"),
        ({"embedding_request": "{}"}, "'embedding_request' must be an object"),
        ({"embedding_request": '{"input": [1, 2]}'}, "tokens are not supported"),
        ({"embedding_request": '{"input": "a", "inputs": 1}'}, "'embedding_request' has 'inputs'"),
        ({"embedding_request": '{"input": "a", "pooling_params": {"dimensions": 9}}'}, "but the model has 8"),
    ],
)
def test_what_is_refused(server: Serving, said: dict[str, Any], text: str) -> None:
    status, answer = generate(server, "narrow", **said)
    assert (status, text in answer["error"]) == (400, True), answer


@pytest.mark.feature("openvino_genai", "reranking")
def test_reranking(server: Serving) -> None:
    status, whole = rerank(server, query="which", documents=[*TEXTS, {"text": "one"}])
    assert status == 200
    assert [each["index"] for each in whole["results"]][-4:].count(3) == 1
    rated = {each["index"]: each for each in whole["results"]}
    assert [each["relevance_score"] for each in whole["results"]] == sorted(
        (each["relevance_score"] for each in whole["results"]), reverse=True
    )
    assert rated[0]["relevance_score"] == pytest.approx(rated[3]["relevance_score"], abs=1e-6)
    assert rated[1]["document"] == {"text": TEXTS[1]}
    assert whole["usage"]["total_tokens"] > sum(map(len, TEXTS))
    _, best = rerank(server, query="which", documents=[*TEXTS, "one"], top_n=1, return_documents=False)
    assert [each.keys() for each in best["results"]] == [{"index", "relevance_score"}]
    assert best["results"][0]["index"] == whole["results"][0]["index"]
    # More than one run of the network has room for.
    _, many = rerank(server, query="which", documents=[f"text {number % 40}" for number in range(80)])
    scores = {each["index"]: each["relevance_score"] for each in many["results"]}
    assert len(scores) == 80
    assert [scores[at] for at in range(40)] == pytest.approx([scores[at + 40] for at in range(40)], abs=1e-5)


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [1]}, "documents[0]"),
        ({"query": "a", "documents": ["b"], "model": "vectors"}, "model"),
        ({"query": "a", "documents": ["b"], "model": "nothing"}, "model"),
    ],
)
def test_what_is_refused_of_rerankings(server: Serving, said: dict[str, Any], param: str) -> None:
    status, answer = rerank(server, **said)
    assert (status in (400, 404), answer["error"]["param"]) == (True, param), answer


def test_texts_too_long_to_rate(server: Serving) -> None:
    status, answer = rerank(server, query="a", documents=["b", "c" * 600])
    assert (status, "tokens, but the model takes 512: make it shorter" in answer["error"]["message"]) == (400, True)


def test_models_are_listed_and_asked_for_what_they_do(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["named", "narrow", "rates", "vectors", "writes"]
    with pytest.raises(openai.BadRequestError, match="Model 'vectors' is not a text model"):
        client.completions.create(model="vectors", prompt="a")
    with pytest.raises(openai.BadRequestError, match="Model 'writes' is not an embedding model"):
        client.embeddings.create(model="writes", input="a")


def test_scores(server: Serving) -> None:
    results = rerank(server, query=TEXTS[0], documents=TEXTS)[1]["results"]
    ranked = {each["index"]: each["relevance_score"] for each in results}
    status, _, body = server.ask("POST", "/v1/score", {"model": "rates", "text_1": TEXTS[0], "text_2": TEXTS})
    told = json.loads(body)
    assert (status, told["object"], told["usage"]["prompt_tokens"] > 0) == (200, "list", True)
    assert [each["score"] for each in told["data"]] == pytest.approx([ranked[index] for index in range(3)], abs=1e-5)
    pairs = {"model": "rates", "queries": TEXTS, "documents": TEXTS}
    status, _, body = server.ask("POST", "/v1/score", pairs)
    assert (status, len(json.loads(body)["data"])) == (200, 3)
    assert json.loads(body)["data"][0]["score"] == pytest.approx(ranked[0], abs=1e-5)
    status, _, body = server.ask("POST", "/v1/score", {**pairs, "queries": TEXTS[:2]})
    assert (status, json.loads(body)["error"]["param"]) == (400, "queries")


def test_embeddings_of_token_ids(server: Serving, client: openai.OpenAI) -> None:
    status, _, body = server.ask("POST", "/tokenize", {"model": "writes", "prompt": "one"})
    assert status == 200
    ids = json.loads(body)["tokens"]
    made = client.embeddings.create(model="vectors", input=[ids])
    (plain,) = client.embeddings.create(model="vectors", input="one").data
    assert made.data[0].embedding == pytest.approx(plain.embedding, abs=1e-5)
    assert made.usage.prompt_tokens == 3
    with pytest.raises(openai.BadRequestError, match="100000, but the vocabulary has") as refused:
        client.embeddings.create(model="vectors", input=[[100_000]])
    assert refused.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="the model has no detokenizer"):
        client.embeddings.create(model="named", input=[ids])
