"""The pipelines in ``examples/pipelines``: their pages are followed, and what they answer is right."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from pages import ROOT, Page, run
from serving import Serving, serving

PIPELINES = ROOT / "examples" / "pipelines"
MADE = shutil.ignore_patterns("*.onnx", "*.npy", "*.npz", "*.json", "*.joblib", "__pycache__")

# Training takes a quarter of a minute, or longer where others use the machine.
pytestmark = pytest.mark.timeout(300)


class Followed:
    """A pipeline that was made and is served as its page says."""

    def __init__(self, page: Page, folder: Path, server: Serving, client: str) -> None:
        self.page = page
        self.folder = folder
        self.server = server
        self._client = client

    def client(self, options: str = "") -> str:
        """Run the client of the page; return what it prints."""
        grpc = "tritonclient.grpc" in (self.folder / "client.py").read_text()
        url = self.server.grpc if grpc else self.server.http
        return run(f"{self._client} --url {url} {options}", cwd=self.folder.parents[2], seconds=100)

    def infer(self, model: str, output: str, **inputs: list[Any]) -> list[Any]:
        """Send texts; return the data of one output."""
        shape = [len(next(iter(inputs.values()))), *([1] if model != "rag" else [])]
        tensors = [{"name": name, "shape": shape, "datatype": "BYTES", "data": data} for name, data in inputs.items()]
        status, _, body = self.server.ask(
            "POST", f"/v2/models/{model}/infer", {"inputs": tensors, "outputs": [{"name": output}]}
        )
        assert status == 200, body
        data: list[Any] = json.loads(body)["outputs"][0]["data"]
        return data

    def module(self, name: str) -> dict[str, Any]:
        """Return what is in a program of the pipeline."""
        return runpy.run_path(str(self.folder / f"{name}.py"))


@contextmanager
def followed(name: str, tmp_path: Path) -> Iterator[Followed]:
    """Run the commands of a pipeline's page, on a copy of its folder from which nothing was made yet."""
    page = Page(f"examples/pipelines/{name}/README.md")
    make, serve, client = page.block("nerite serve").strip().splitlines()
    folder = tmp_path / "examples" / "pipelines" / name
    shutil.copytree(PIPELINES / name, folder, ignore=MADE)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    run(make, cwd=tmp_path, seconds=250)
    assert serve == f"nerite serve examples/pipelines/{name}/models"
    run(f"nerite check {folder / 'models'}")
    with serving(folder / "models", tmp_path / "log") as server:
        yield Followed(page, folder, server, client)


def without_shares(text: str) -> str:
    """Return what was printed without how sure a model was, which differs a little between machines."""
    return re.sub(r" *\d+%", " %", text)


def cited_first(text: str) -> list[tuple[str, str]]:
    """Return each question with the page that its answer names first: the words change with the documentation."""
    return re.findall(r"^(\S[^\n]*)\n[^[]*\[([^,]+),", text, re.MULTILINE)


def test_vision_language(tmp_path: Path) -> None:
    with followed("vision_language", tmp_path) as pipeline:
        assert without_shares(pipeline.client()) == without_shares(pipeline.page.block("a picture of"))
        pictures = pipeline.module("pictures")
        chance = Random(11)
        client = triton.InferenceServerClient(pipeline.server.grpc)
        answers = []
        for number in range(60):
            picture = pictures["draw"](chance)
            asked, right = zip(*pictures["questions"](picture, chance), strict=True)
            image = picture.encoded("PNG" if number % 2 else "JPEG")
            inputs = []
            for name, rows in (("image", [image] * len(asked)), ("question", [text.encode() for text in asked])):
                inputs.append(triton.InferInput(name, [len(asked), 1], "BYTES"))
                inputs[-1].set_data_from_numpy(np.array(rows, dtype=object).reshape(-1, 1))
            given = client.infer("vision_language", inputs).as_numpy("answer")[:, 0]
            answers += [answer.decode() == expected for answer, expected in zip(given, right, strict=True)]
        assert np.mean(answers) > 0.95
        inputs[0].set_data_from_numpy(np.array([[b"no picture"]] * len(asked), dtype=object))
        with pytest.raises(triton.InferenceServerException, match="image 0 cannot be read"):
            client.infer("vision_language", inputs)


def test_bert_sentiment(tmp_path: Path) -> None:
    with followed("bert_sentiment", tmp_path) as pipeline:
        assert without_shares(pipeline.client()) == without_shares(pipeline.page.block("The soup was"))
        sentences = pipeline.module("sentences")
        reviews = sentences["reviews"](192, seed=11)
        given = []
        for start in range(0, len(reviews), 32):
            given += pipeline.infer("bert_sentiment", "label", text=[text for text, _ in reviews[start : start + 32]])
        right = [sentences["LABELS"][label] for _, label in reviews]
        assert np.mean([answer == expected for answer, expected in zip(given, right, strict=True)]) > 0.93
        # Padded to steps of sixteen, with however many others.
        lengths = [len(pipeline.infer("tokenizer", "input_ids", text=["good " * count])) for count in (1, 14, 15, 40)]
        assert lengths == [16, 16, 32, 48]


def test_ab_test(tmp_path: Path) -> None:
    with followed("ab_test", tmp_path) as pipeline:
        assert without_shares(pipeline.client()) == without_shares(pipeline.page.block("digits        version 1"))
        ran = {
            version: pipeline.server.json("GET", f"/v2/models/digits/versions/{version}/stats")["model_stats"][0]
            for version in (1, 2)
        }
        # By itself and as a step of the ensemble, each time the one of the two that the user has.
        assert ran[1]["inference_count"] == 2 * 691
        assert ran[2]["inference_count"] == 2 * 207
        reading = {"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [0.0] * 64}
        answer = pipeline.server.json("POST", "/v2/models/ab_ensemble/infer", {"inputs": [reading]})
        given = {output["name"]: output["data"][0] for output in answer["outputs"]}
        words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
        assert given["word"] == words[given["digit"]]


def test_rag(tmp_path: Path) -> None:
    sources = {
        "Which port does SageMaker use?": "clouds.md",
        "Can keys be rotated without a restart?": "access.md",
        "Can a model have its own Python environment?": "python-models.md",
        "What becomes of a trace when the collector is away?": "traces.md",
        "How do I make the log JSON?": "logs.md",
        "Which origins may a browser come from?": "access.md",
        "Where are downloaded files cached?": "repositories.md",
        "What does numpy cost in site-packages?": "dependencies.md",
    }
    with followed("rag", tmp_path) as pipeline:
        assert cited_first(pipeline.client()) == cited_first(
            pipeline.page.block("Which origins may a browser come from?\n")
        )
        found = {
            question: [source.partition(",")[0] for source in pipeline.infer("rag", "sources", question=[question])]
            for question in sources
        }
        assert [question for question, page in sources.items() if page not in found[question]] == []
        # Documents change, and another page may come to say the same. Most questions go straight to theirs.
        assert sum(page == found[question][0] for question, page in sources.items()) >= len(sources) - 2
        assert pipeline.infer("rag", "answer", question=["xyzzy?"]) == ["The documents do not say."]
        # The same sentences, each with its source, one after the other.
        events = run(pipeline.page.block("curl"), pipeline.server).split("data: ")[1:]
        sentences = [json.loads(event)["answer"].rpartition(" [")[0] for event in events]
        assert len(sentences) == 2
        question = "Which origins may a browser come from?"
        (answer,) = pipeline.infer("rag", "answer", question=[question])
        assert answer.rpartition(" [")[0] == " ".join(sentences)
        assert pipeline.client(f"--stream '{question}'").count("[access.md") == 2


def test_batching(tmp_path: Path) -> None:
    with followed("batching", tmp_path) as pipeline:
        printed = pipeline.client()
    alone, together, right, urgent, impatient = printed.splitlines()
    assert alone.endswith("batches of 1 (100 times)")
    assert "16 (" in together
    assert right == "    99% of the digits are read right"
    first, last = map(int, re.findall(r"\d+", urgent)[-2:])
    assert 1 < first < last < 300
    assert impatient.endswith(" were told in time that it will not do")
    assert int(re.findall(r"\d+", impatient)[-1]) > 0
    # The page has the same lines.
    shown = pipeline.page.block("all at once:")
    assert [re.sub(r"[\d.]+", "", line)[:30] for line in shown.splitlines()] == [
        re.sub(r"[\d.]+", "", line)[:30] for line in printed.splitlines()
    ]


def test_ocr(tmp_path: Path) -> None:
    with followed("ocr", tmp_path) as pipeline:
        assert pipeline.client() == pipeline.page.block("words on 20 pages")
        drawn = pipeline.module("drawing")["drawn_page"]
        (tmp_path / "page.png").write_bytes(drawn(["NERITE", "READS"], Random(3)))
        assert pipeline.client(str(tmp_path / "page.png")).endswith(": NERITE READS\n")
        answer = json.loads(run(pipeline.page.block("curl"), pipeline.server, cwd=tmp_path))
        assert answer["outputs"][0]["data"] == ["NERITE", "READS"]
        (tmp_path / "empty.png").write_bytes(drawn([], Random(3)))
        assert pipeline.client(str(tmp_path / "empty.png")).endswith(": \n")
        status, _, body = pipeline.server.ask("POST", "/v2/models/ocr/infer", b"no picture", content_type="image/png")
        assert (status, "cannot be read" in body.decode()) == (400, True)


def test_speech_activity(tmp_path: Path) -> None:
    with followed("speech_activity", tmp_path) as pipeline:
        assert pipeline.client() == pipeline.page.block("nobody speaks")
        # One call after the other, each from its beginning: what was heard of another is not remembered.
        client = pipeline.module("client")
        samples = client["made_up"](5, [(1.0, 2.0)])
        alone = client["heard"](pipeline.server.grpc, {"call": samples})["call"]
        together = client["heard"](pipeline.server.grpc, {"quiet": samples * 0.2, "call": samples})
        assert together["call"] == alone
        assert [round(end - begin, 1) for begin, end in client["stretches"](alone)] == [1.0]
        assert max(client["heard"](pipeline.server.grpc, {"tail": samples[: 512 * 20]})["tail"]) < 0.5


def test_text_topics(tmp_path: Path) -> None:
    with followed("text_topics", tmp_path) as pipeline:
        assert without_shares(pipeline.client()) == without_shares(pipeline.page.block("teh webiste"))
        texts, topics = pipeline.module("tickets")["tickets"](200, seed=11)
        given = pipeline.infer("topics", "topic", text=texts)
        assert np.mean([one == other for one, other in zip(given, topics, strict=True)]) > 0.97
        (best, _) = json.loads(run(pipeline.page.block("classification"), pipeline.server))["outputs"][0]["data"]
        assert best.endswith(":technical")
