"""Images on a real engine: they count, they are refused where they are none, and they harm nobody else."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from llm_listening import FEW, Heard, asked, eventually, ignored
from llm_models import write_tokenizer
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.llm import images
from nerite.llm.demand import IMAGE_TOKENS
from nerite.llm.engine import FinishReason
from nerite.llm.openvino_genai import OpenVinoGenAiEngine
from nerite.llm.openvino_genai.options import PipelineOptions
from nerite.llm.structured_output import Grammar
from seeing_models import MARK, TOKENS, seeing_model

CONTEXT = 4000


def picture(seed: int, kind: str = "PNG", size: tuple[int, int] = (20, 10)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenVinoGenAiEngine]:
    directory = seeing_model(tmp_path_factory.mktemp("model") / "1", CONTEXT)
    made = OpenVinoGenAiEngine(PipelineOptions("m", directory, cache_blocks=256, context_length=CONTEXT))
    made.start(ignored, ignored)
    yield made
    made.stop()


def seen(engine: OpenVinoGenAiEngine, *files: bytes, prompt: str = "what is it", id: str = "a") -> Heard:
    return asked(engine, replace(FEW, logprobs=0), prompt, id, images=files)


@pytest.mark.feature("openvino_genai", "images")
def test_images_count(engine: OpenVinoGenAiEngine) -> None:
    first, second = picture(1), picture(2)
    chosen = ((), (first,), (second,), (first, second), (second, first))
    told = [seen(engine, *files).over() for files in chosen]
    assert {len(heard.tokens()) for heard in told} == {8}
    # Also their order, which need not change which token is likeliest.
    assert len({heard.deltas[0].logprobs[0].logprob for heard in told}) == 5
    assert seen(engine, first).over().tokens() == told[1].tokens()
    assert seen(engine, picture(1, "BMP")).over().tokens() == told[1].tokens()


def test_special_tokens_are_added_once(engine: OpenVinoGenAiEngine, tmp_path: Path) -> None:
    write_tokenizer(seeing_model(tmp_path / "1", CONTEXT), MARK, begin=True)
    begins = OpenVinoGenAiEngine(PipelineOptions("m", tmp_path / "1", cache_blocks=64, context_length=CONTEXT))
    begins.start(ignored, ignored)
    for prompt, files in (("what is it\n ", []), (f"{MARK}what is it\n ", [picture(1)])):
        expected = asked(engine, prompt=f"<s>{prompt}", images=files).over()
        for said, special in ((f"<s>{prompt}", False), (prompt, True)):
            told = asked(begins, prompt=said, special_tokens=special, images=files).over()
            assert (told.text_tokens, told.tokens()) == (expected.text_tokens, expected.tokens())
    begins.stop()


def test_what_an_image_becomes_is_known_from_the_first_of_its_size(tmp_path: Path) -> None:
    made = OpenVinoGenAiEngine(PipelineOptions("m", seeing_model(tmp_path / "1", CONTEXT), cache_blocks=256))
    made.start(ignored, ignored)
    text, each = len("what is it"), TOKENS + 1  # and an end of line
    small, large = picture(1), picture(1, size=(40, 30))
    try:
        for files, tokens in (
            ((), text),
            ((small, large), text + 2 * IMAGE_TOKENS),  # nobody can say which had how many
            ((small,), text + IMAGE_TOKENS),
            ((small, small), text + 2 * each),
            ((large,), text + each),  # as many as the largest that is known
        ):
            assert seen(made, *files).over().prompt_tokens == tokens
        assert made.stats().prompt_tokens == 5 * text + 3 * IMAGE_TOKENS + 3 * each
    finally:
        made.stop()


def test_where_an_image_stands(engine: OpenVinoGenAiEngine) -> None:
    file = picture(1)
    before = seen(engine, file).over().tokens()
    assert seen(engine, file, prompt=f"{MARK}what is it").over().tokens() == before
    assert seen(engine, file, prompt=f"what is {MARK} it").over().tokens() != before


def test_several_at_once(engine: OpenVinoGenAiEngine) -> None:
    alone = [seen(engine, picture(seed)).over().tokens() for seed in range(4)]
    together = [seen(engine, picture(seed), id=str(seed)) for seed in range(4)]
    assert [heard.over().tokens() for heard in together] == alone
    both = asked(engine, replace(FEW, n=2, temperature=1.0, seed=1), "x", images=[picture(1)]).over()
    assert [len(both.tokens(index)) for index in range(2)] == [8, 8]
    formed = asked(
        engine, replace(FEW, ignore_eos=False), images=[picture(1)], grammar=Grammar("regex", "[0-9]{3}")
    ).over()
    assert formed.text().isdecimal()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (b"", "'image' 0 is not in one of the formats"),
        (b"no image", "'image' 0 is not in one of the formats JPEG, PNG"),
        (picture(1)[:60], "'image' 0 cannot be read"),
    ],
)
def test_what_is_no_image_fails_alone(engine: OpenVinoGenAiEngine, file: bytes, text: str) -> None:
    neighbour = asked(engine, replace(FEW, max_tokens=3000), id="neighbour", images=[picture(3)]).begun()
    with pytest.raises(InvalidArgument, match=text):
        seen(engine, file, id="broken")
    count = len(neighbour.tokens())
    eventually(lambda: len(neighbour.tokens()) > count)
    engine.abort("neighbour")
    assert neighbour.over().reason is FinishReason.ABORT


def test_a_prompt_that_its_images_make_too_long(engine: OpenVinoGenAiEngine) -> None:
    neighbour = asked(engine, replace(FEW, max_tokens=3000), id="neighbour").begun()
    many = asked(engine, replace(FEW, max_tokens=None), "x" * (CONTEXT - 6), images=[picture(1)] * 3)
    with pytest.raises(InvalidArgument, match="the prompt with its images has more than 4000 tokens"):
        many.over()
    engine.abort("neighbour")
    assert neighbour.over().reason is FinishReason.ABORT
    assert engine.stats().failures == 0


def test_more_pixels_than_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    with pytest.raises(InvalidArgument, match="'image' 0 has 20 x 10 pixels; the maximum is 100 pixels"):
        images.pixels([picture(1)])


def test_what_a_model_with_images_cannot_be_told(engine: OpenVinoGenAiEngine) -> None:
    with pytest.raises(Unsupported, match="needs its prompt as text, and cannot truncate it"):
        asked(engine, FEW, [1, 2, 3])
    with pytest.raises(Unsupported, match="needs its prompt as text, and cannot truncate it"):
        asked(engine, replace(FEW, truncate_prompt_tokens=3), images=[picture(1)])
