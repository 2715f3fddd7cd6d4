"""Models of other kinds on the real vLLM: those that guess tokens, and those that see."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from checkpoints import language_checkpoint
from llm_models import byte_tokenizer
from serving import Serving
from vllm_serving import WHERE_VLLM_IS, run_beside_vllm, vllm_serving

pytestmark = WHERE_VLLM_IS

CONTEXT, CHUNK = 512, 64
FEW = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
CONFIG = """
backend: "vllm"
parameters [
  {{ key: "MAX_MODEL_LEN" value {{ string_value: "{context}" }} }},
  {{ key: "KV_CACHE_GB" value {{ string_value: "1" }} }},
  {{ key: "MAX_NUM_SEQS" value {{ string_value: "4" }} }}
  {more}
]
"""
GUESSING = {
    "plain": f', {{ key: "MAX_NUM_BATCHED_TOKENS" value {{ string_value: "{CHUNK}" }} }}',
    "looks": ', { key: "PROMPT_LOOKUP_MAX" value { string_value: "3" } }',
    "guesses": ', { key: "SPECULATIVE_MODEL" value { string_value: "../../plain/1" } }',
}
ARGUMENTS = {"enforce_eager": True}
SEEING = """
import torch
from transformers import (
    Blip2Config, Blip2ForConditionalGeneration, Blip2QFormerConfig, Blip2VisionConfig, OPTConfig
)

width = {"hidden_size": 64, "num_attention_heads": 1}
vision = Blip2VisionConfig(**width, intermediate_size=64, num_hidden_layers=1, image_size=8, patch_size=4)
query = Blip2QFormerConfig(**width, intermediate_size=64, num_hidden_layers=2, encoder_hidden_size=64, vocab_size=264)
text = OPTConfig(
    **width, ffn_dim=128, num_hidden_layers=2, word_embed_proj_dim=64, vocab_size=264, max_position_embeddings=600,
    bos_token_id=0, eos_token_id=1, pad_token_id=0,
)
config = Blip2Config(
    vision_config=vision.to_dict(), qformer_config=query.to_dict(), text_config=text.to_dict(), num_query_tokens=4,
    image_token_index=258,
)
torch.manual_seed(0)
model = Blip2ForConditionalGeneration(config)
for weights in model.parameters():
    torch.nn.init.normal_(weights, std=0.3)
model.save_pretrained(DIRECTORY)
"""
IMAGE_TOKENS = 4


def seeing_checkpoint(directory: Path) -> None:
    """Write a BLIP-2 of random weights: of those that take images, it needs the least beside vLLM."""
    run_beside_vllm(f"DIRECTORY = {str(directory)!r}\n{SEEING}")
    byte_tokenizer(("<image>",)).save_pretrained(directory)
    seen = {
        "image_processor_type": "BlipImageProcessor", "size": {"height": 8, "width": 8}, "do_resize": True,
        "do_normalize": True, "do_rescale": True, "rescale_factor": 1 / 255, "resample": 3, "do_convert_rgb": True,
        "image_mean": [0.5] * 3, "image_std": [0.3] * 3,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(seen))
    (directory / "processor_config.json").write_text(
        json.dumps({"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS})
    )


def write(models: Path, name: str, more: str = "") -> Path:
    """Write the configuration of a model; return where its checkpoint belongs."""
    version = models / name / "1"
    version.parent.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG.format(context=CONTEXT, more=more))
    return version


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    place = tmp_path_factory.mktemp("vllm")
    models = place / "models"
    for name, more in GUESSING.items():
        (language_checkpoint(write(models, name, more)) / "model.json").write_text(json.dumps(ARGUMENTS))
    sees = write(models, "sees")
    seeing_checkpoint(sees)
    (sees / "model.json").write_text(json.dumps(ARGUMENTS))
    with vllm_serving(models, place / "log") as running:
        yield running


def generate(server: Serving, model: str, **said: Any) -> tuple[int, Any]:
    body = {"text_input": "once upon a time, once upon", "exclude_input_in_output": True, **said}
    status, _, answer = server.ask("POST", f"/v2/models/{model}/generate", body)
    return status, json.loads(answer)


def counted(server: Serving, name: str, model: str) -> float:
    return server.metrics()[f'vllm:{name}{{model="{model}",version="1"}}']


@pytest.mark.feature("vllm", "speculation, prompt lookup")
@pytest.mark.feature("vllm", "speculation, draft model")
@pytest.mark.parametrize("model", ["looks", "guesses"])
def test_guesses(server: Serving, model: str) -> None:
    many = {"parameters": {**FEW, "max_tokens": 60}}
    status, told = generate(server, model, **many)
    assert (status, told["text_output"]) == (200, generate(server, "plain", **many)[1]["text_output"])
    drafted = counted(server, "spec_decode_num_draft_tokens_total", model)
    accepted = counted(server, "spec_decode_num_accepted_tokens_total", model)
    assert 0 < accepted <= drafted
    if model == "guesses":  # As the model itself would, but beyond the last token that is wanted.
        assert drafted - accepted <= 5 < accepted


@pytest.mark.feature("vllm", "long prompts in several steps (chunked prefill)")
def test_a_prompt_that_is_longer_than_a_step(server: Serving) -> None:
    long = {"text_input": "x" * (CONTEXT - 40), "parameters": FEW, "return_num_input_tokens": True}
    told = generate(server, "plain", **long)[1]
    assert told["num_input_tokens"] == CONTEXT - 40 > 4 * CHUNK
    # Tokens of a step that has room for all of it.
    assert told["text_output"] == generate(server, "guesses", **long)[1]["text_output"]


def picture(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 255, (10, 20, 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.feature("vllm", "images")
def test_images(server: Serving) -> None:
    asked = {
        "text_input": "what is it",
        "sampling_parameters": json.dumps({**FEW, "logprobs": 0}),
        "return_num_input_tokens": True,
        "return_cumulative_logprob": True,
    }
    blind, first, again, second = (
        generate(server, "sees", **asked, **({"image": [image]} if image else {}))
        for image in ("", picture(1), picture(1), picture(2))
    )
    assert {status for status, _ in (blind, first, again, second)} == {200}
    tokens = len("what is it")
    assert [told["num_input_tokens"] for _, told in (blind, first, second)] == [
        tokens, tokens + IMAGE_TOKENS, tokens + IMAGE_TOKENS
    ]  # fmt: skip
    assert first == again
    assert len({told["cumulative_logprob"] for _, told in (blind, first, second)}) == 3
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(1)}"}},
        {"type": "text", "text": "what is it"},
    ]
    chat = {"model": "sees", "messages": [{"role": "user", "content": parts}], **FEW}
    assert server.json("POST", "/v1/chat/completions", chat)["usage"]["prompt_tokens"] > tokens + IMAGE_TOKENS


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"image": ["?"]}, "'image' 0 is not valid base64"),
        ({"image": ["aGk="]}, "'image' 0 is not in one of the formats JPEG"),
        ({"image": [picture(1)[:80]]}, "'image' 0 cannot be read"),
        ({"image": [picture(1), picture(2)]}, "At most 1 image(s) may be provided"),
        ({"image": [picture(1)], "text_input": "x" * (CONTEXT - 2)}, "vllm error in starting a request"),
        ({"image": [picture(1)], "parameters": {"truncate_prompt_tokens": 3}}, "cannot be truncated"),
    ],
)
def test_images_that_are_refused(server: Serving, said: dict[str, Any], text: str) -> None:
    status, answer = generate(server, "sees", **said)
    assert (status, text in answer["error"]) == (400, True), answer
    assert generate(server, "sees", parameters=FEW)[0] == 200


def test_a_model_that_does_not_see(server: Serving) -> None:
    status, answer = generate(server, "plain", image=[picture(1)])
    assert (status, "the model takes no images" in answer["error"]) == (400, True)
