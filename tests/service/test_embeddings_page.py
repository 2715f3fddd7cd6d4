"""docs/embeddings.md: its models load as it says, and what it asks is answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pages import Page, run
from reading_models import WIDTH, classifying_model, embedding_model, reranking_model
from serving import serving
from tools import require

PAGE = Page("docs/embeddings.md")


def test_the_page(tmp_path: Path) -> None:
    require("curl")
    models = tmp_path / "models"
    exported = PAGE.block("optimum-cli")
    assert [line.split()[-1] for line in exported.splitlines()[1:]] == ["models/vectors/1", "models/rates/1"]
    assert PAGE.block("serve") == "nerite serve models\n"
    embedding_model(models / "vectors" / "1")
    reranking_model(models / "rates" / "1")
    classifying_model(models / "moods" / "1", "yes", "no")
    embedding_model(models / "said" / "1", architectures=["OwnForCausalLM"])
    (models / "said" / "config.pbtxt").write_text(PAGE.block("POOLING_TYPE"))
    several, one, rated, sorted_texts = [text for _, text in PAGE.blocks if text.startswith("curl")]
    with serving(models, tmp_path / "log") as server:
        first, _ = json.loads(run(several, server))["data"]
        assert json.loads(run(one, server))["embedding"] == pytest.approx(first["embedding"], abs=1e-5)
        (best,) = json.loads(run(rated, server))["results"]
        assert best["document"]["text"] in ("A sea snail.", "A kind of tea.")
        assert [each["num_classes"] for each in json.loads(run(sorted_texts, server))["data"]] == [2, 2]
        said = json.loads(server.ask("POST", "/v2/models/said/generate", {"text_input": "a text"})[2])
        assert len(said["embedding"]) == WIDTH
