"""Texts of tokens, as the framework has them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from llm_models import write_tokenizer
from nerite.llm.openvino_genai import framework, running

MARKS = re.compile("\ufffd+")
TEXT = "Grüße, 世界 👋🏽! \n\ttabs and  spaces\x00 ."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, "<tool>")
    return folder


def test_texts_are_those_of_the_framework(directory: Path) -> None:
    ours, theirs = running.read_vocabulary(directory), framework.tokenizer(directory)
    assert ours is not None
    tokens = theirs.encode(TEXT).input_ids.data[0].tolist()
    assert ours.decode(tokens) == TEXT == theirs.decode(tokens)
    special = [0, *tokens[:3], 1, 258]
    for skip in (True, False):
        assert ours.decode(special, skip_special_tokens=skip) == theirs.decode(special, skip_special_tokens=skip)
    assert ours.decode([tokens[:4], tokens[4:9]]) == theirs.decode([tokens[:4], tokens[4:9]])
    chance = random.Random(5)
    for _ in range(300):
        some = [chance.randrange(2, 258) for _ in range(chance.randrange(1, 12))]
        # In how many marks bytes end that are no characters is the framework's own way.
        assert MARKS.sub("?", ours.decode(some)) == MARKS.sub("?", theirs.decode(some))


def test_tokens_that_nobody_knows(directory: Path) -> None:
    ours = running.read_vocabulary(directory)
    assert ours is not None
    assert ours.decode([100_000]) == ours.decode([]) == ""


def test_where_a_text_is_more_than_its_tokens(directory: Path, tmp_path: Path) -> None:
    network = (directory / "openvino_detokenizer.xml").read_text()
    (tmp_path / "openvino_detokenizer.xml").write_text(
        network.replace('type="FuzeRagged"', 'type="RegexNormalization"')
    )
    assert running.read_vocabulary(tmp_path) is None
