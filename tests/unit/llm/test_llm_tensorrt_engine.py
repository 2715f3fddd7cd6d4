"""What TensorRT-LLM would be given, and what is refused before: the rest needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import NeriteError, Unsupported
from nerite.llm import tensorrt_llm
from nerite.llm.tensorrt_llm import TensorRtLlmEngine


def model(folder: Path, **parameters: str) -> ModelContext:
    return ModelContext(
        "m", 1, folder, {"parameters": {key: {"string_value": said} for key, said in parameters.items()}}
    )


def test_arguments(tmp_path: Path) -> None:
    said = {"MAX_NUM_SEQS": "8", "TENSOR_PARALLEL_SIZE": "2", "KV_CACHE_GB": "1", "ENABLE_PREFIX_CACHING": "false"}
    assert tensorrt_llm.read_arguments(model(tmp_path, **said)) == {
        "model": str(tmp_path / "1"),
        "max_batch_size": 8,
        "tensor_parallel_size": 2,
        "kv_cache": {"enable_block_reuse": False, "max_gpu_total_bytes": 1 << 30},
    }


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"MAX_NUM_SEQ": "8"}, "Did you mean MAX_NUM_SEQS"),
        ({"MAX_NUM_SEQS": "-1"}, "it must be above 0"),
        ({"PROMPT_LOOKUP_MAX": "3"}, "'PROMPT_LOOKUP_MAX', which the engine tensorrt_llm does not support"),
    ],
)
def test_parameters_that_are_wrong(tmp_path: Path, said: dict[str, str], text: str) -> None:
    with pytest.raises(NeriteError, match=text):
        tensorrt_llm.read_arguments(model(tmp_path, **said))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(Unsupported, match="nerite engines install tensorrt-llm"):
        TensorRtLlmEngine({}, InstanceContext("m_0")).start(lambda stats: None, lambda reason: None)
