"""An adapter beside a model: it counts as far as its configuration says, and what would be ignored is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_listening import FEW, asked, ignored
from llm_models import language_model
from lora_adapters import ALPHA, RANK, adapter
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.llm.openvino_genai import OpenVinoGenAiEngine, options

TOLD = replace(FEW, max_tokens=24, logprobs=0)


def read(directory: Path, **parameters: str) -> Any:
    given = {key: {"string_value": value} for key, value in parameters.items()}
    context = ModelContext("m", 1, directory.parent, {"backend": "llm", "parameters": given})
    return options.read(context, InstanceContext("m_0"))


def generated(directory: Path, lora: str = "") -> tuple[list[int], list[float]]:
    engine = OpenVinoGenAiEngine(read(directory, NUM_KV_BLOCKS="64", INFERENCE_PRECISION_HINT="f32"))
    engine.start(ignored, ignored)
    try:
        heard = asked(engine, TOLD, lora=lora).over()
    finally:
        engine.stop()
    return heard.tokens(), [each.logprob for delta in heard.deltas for each in delta.logprobs]


@pytest.mark.feature("openvino_genai", "LoRA, one for all requests")
def test_answers_are_those_of_the_model_with_the_adapter_in_it(tmp_path: Path) -> None:
    directory = language_model(tmp_path / "with" / "1", 4000)
    changes = adapter(directory)
    tokens, likely = generated(directory, "poet")
    expected, expected_likely = generated(language_model(tmp_path / "merged" / "1", 4000, changes))
    assert tokens == expected
    assert likely == pytest.approx(expected_likely, abs=0.02)
    plain, _ = generated(language_model(tmp_path / "plain" / "1", 4000))
    assert tokens != plain
    # Nobody gets the model without it.
    assert generated(directory)[0] == tokens


def test_a_request_for_another_adapter(tmp_path: Path) -> None:
    directory = language_model(tmp_path / "1", 4000)
    adapter(directory)
    with pytest.raises(Unsupported, match=r"LoRA novelist is not supported, we currently support \['poet'\]"):
        generated(directory, "novelist")


@pytest.mark.parametrize(
    ("described", "kind", "text"),
    [
        ({"use_dora": True}, Unsupported, "the adapter 'poet' has 'use_dora' in adapter_config.json"),
        ({"modules_to_save": ["lm_head"]}, Unsupported, "has 'modules_to_save'"),
        ({"r": None}, InvalidArgument, "has no adapter_config.json with 'r' and 'lora_alpha'"),
    ],
)
def test_adapters_that_the_engine_would_not_do(
    tmp_path: Path, described: dict[str, Any], kind: type[NeriteError], text: str
) -> None:
    directory = language_model(tmp_path / "1")
    adapter(directory, **described)
    with pytest.raises(kind, match=text):
        read(directory)


def test_files_that_are_wrong(tmp_path: Path) -> None:
    directory = language_model(tmp_path / "1", 4000)
    adapter(directory, "stranger", ("model.layers.0.mlp.up_proj",))
    with pytest.raises(InvalidArgument, match=r"lora_A.weight', for which the model has no layer"):
        generated(directory)
    adapter(directory, "poet")
    with pytest.raises(Unsupported, match=r"model 'm' has 2 adapters in multi_lora.json \(poet, stranger\)"):
        read(directory)
    (directory / "multi_lora.json").write_text('{"poet": "adapters/nowhere"}')
    with pytest.raises(Unavailable, match=r"the adapter 'poet' of multi_lora.json has no '.*nowhere/adapter_model"):
        read(directory)
    (directory / "multi_lora.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="must map names of adapters to directories"):
        read(directory)
    (directory / "multi_lora.json").write_text('{"poet": "adapters/poet"}')
    (directory / "adapters" / "poet" / "adapter_model.safetensors").write_bytes(b"not what it should be")
    with pytest.raises(InvalidArgument, match="is not a safetensors file"):
        generated(directory)


def test_how_far_an_adapter_counts(tmp_path: Path) -> None:
    directory = language_model(tmp_path / "1")
    adapter(directory, use_rslora=True)
    assert read(directory).adapter.scale == ALPHA / RANK**0.5
