"""The programs that serve directories of Hugging Face's transformers, with small models of random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import nerite.artifacts.programs
from nerite.artifacts import directory_kinds
from nerite.artifacts.artifact import Artifact, Candidate
from nerite.artifacts.recognition import recognise
from nerite.config.text import to_text
from nerite.testing import ModelUnderTest, load_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very"]
TEXTS = np.array([["a very good film"], ["bad"]], object)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, an encoder and a generator, as ``save_pretrained`` writes them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]")
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertConfig(**sizes, intermediate_size=16, id2label={0: "bad", 1: "good", 2: "so so"})
    gpt = GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=3)
    made = {"classify": BertForSequenceClassification(bert), "embed": BertModel(bert), "generate": GPT2LMHeadModel(gpt)}
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def loaded(artifact: Artifact, folder: Path) -> ModelUnderTest:
    """Lay a model out, and load it."""
    for name, source in artifact.files.items():
        (folder / "m" / "1" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / "m" / "1" / name)
    if artifact.make is not None:
        artifact.make(folder / "m" / "1")
    (folder / "m" / "config.pbtxt").write_text(to_text(artifact.config))
    return load_model(folder / "m")


def test_classification(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved / "classify")
    encoded = tokenizer([row[0] for row in TEXTS], padding=True, return_tensors="pt")
    logits = AutoModelForSequenceClassification.from_pretrained(saved / "classify").eval()(**encoded).logits
    with loaded(recognise(Candidate(saved / "classify")), tmp_path) as model:
        assert model.config["output"][0]["label_filename"] == "labels.txt"
        scores = model.infer({"text": TEXTS})["scores"]
        first, second = model.execute([{"text": TEXTS[:1]}, {"text": TEXTS[1:]}])
    np.testing.assert_allclose(scores, logits.softmax(1).detach().numpy(), rtol=1e-5)
    assert not isinstance(first, Exception)
    assert not isinstance(second, Exception)
    np.testing.assert_allclose(np.concatenate([first["scores"], second["scores"]]), scores, rtol=1e-5)
    assert (tmp_path / "m" / "labels.txt").read_text() == "bad\ngood\nso so\n"


def test_embedding(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where no engine is installed.
    monkeypatch.setattr(directory_kinds, "runs_on_an_engine", lambda *_: False)
    with loaded(recognise(Candidate(saved / "embed")), tmp_path / "plain") as model:
        plain = model.infer({"text": TEXTS})["embedding"]
        alone = model.infer({"text": TEXTS[1:]})["embedding"]
    assert plain.shape == (2, 16)
    # Padding has no part in the mean.
    np.testing.assert_allclose(plain[1:], alone, atol=1e-5)
    shutil.copytree(saved / "embed", tmp_path / "sentence")
    pooling = tmp_path / "sentence" / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True}))
    (tmp_path / "sentence" / "modules.json").write_text('[{"type": "sentence_transformers.models.Normalize"}]')
    artifact = recognise(Candidate(tmp_path / "sentence"))
    assert artifact.files["weights/1_Pooling"].is_dir()
    files = {name: path for name, path in artifact.files.items() if path.is_file()}
    files["weights/1_Pooling/config.json"] = pooling
    (tmp_path / "other").mkdir()
    with loaded(Artifact("", tmp_path, "", artifact.config, files), tmp_path / "other") as model:
        first_token = model.infer({"text": TEXTS})["embedding"]
    np.testing.assert_allclose(np.linalg.norm(first_token, axis=1), 1, rtol=1e-5)


def test_generation(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where no engine is installed.
    monkeypatch.setattr(directory_kinds, "runs_on_an_engine", lambda *_: False)
    with loaded(recognise(Candidate(saved / "generate")), tmp_path) as model:
        (short,) = model.infer({"text": np.array([b"a very"], object)}, parameters={"max_new_tokens": 2})["generated"]
        # By default more than this model can.
        (long,) = model.infer({"text": np.array([b"a very"], object)})["generated"]
    assert len(short.decode().split()) <= 2
    assert long.startswith(short)


def test_the_programs_need_nothing_of_ours() -> None:
    for path in nerite.artifacts.programs.__path__:
        for program in Path(path).glob("[!_]*.py"):
            assert "import nerite" not in program.read_text()
            assert "from nerite" not in program.read_text()
