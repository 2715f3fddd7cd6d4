"""Requests in a file that warm a model up: how they are read, and what is said of one that is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from nerite.config.model_config import ModelConfig, ModelParameter
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.signature import Signature, SignatureInput
from nerite.models import warm_up
from nerite.models.warm_up import WarmUpSample
from nerite.transports.http import infer_request
from pages import Page

NAMED = ModelConfig(parameters={"WARMUP_REQUESTS": ModelParameter(string_value="requests.jsonl")})
SIGNATURE = Signature("m", 4, [SignatureInput("IN", dtypes.INT32, (2,))], [])


def line(*data: int, **more: Any) -> str:
    tensor = {"name": "IN", "shape": [len(data) // 2, 2], "datatype": "INT32", "data": data}
    return json.dumps({"inputs": [{**tensor, **more}]})


def write(folder: Path, text: str) -> Path:
    (folder / "warmup").mkdir(exist_ok=True)
    (folder / "warmup" / "requests.jsonl").write_text(text)
    return folder


def made(folder: Path, text: str, signature: Signature = SIGNATURE) -> list[WarmUpSample]:
    return warm_up.recorded_samples(NAMED, signature, write(folder, text), infer_request.read_recorded_request)


def test_a_model_without_any(tmp_path: Path) -> None:
    assert warm_up.recorded_samples(ModelConfig(), SIGNATURE, tmp_path, infer_request.read_recorded_request) == []
    assert warm_up.recorded_mistakes(ModelConfig(), SIGNATURE, tmp_path, infer_request.read_recorded_request) == []


def test_each_line_is_a_request(tmp_path: Path) -> None:
    first, second = made(tmp_path, f"{line(1, 2)}\n\n  \r\n{line(1, 2, 3, 4)}")
    assert (first.name, first.rows, first.times) == ("requests.jsonl:1", 1, 1)
    assert [bytes(each) for each in first.data] == [struct.pack("<2i", 1, 2)]
    assert second.name == "requests.jsonl:4"
    assert second.header.batch_size == 2


def test_halves_are_taken_whatever_the_port_takes(tmp_path: Path) -> None:
    half = Signature("m", 4, [SignatureInput("IN", dtypes.FP16, (2,))], [])
    (sample,) = made(tmp_path, line(1, 2, datatype="FP16"), half)
    assert bytes(sample.data[0]) == struct.pack("<2e", 1, 2)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("{", Internal, "failed to parse the request JSON buffer"),
        (line(1, 2, name="OTHER"), InvalidArgument, "OTHER"),
        (line(1, 2, datatype="FP32"), InvalidArgument, "data-type is 'FP32'"),
        (line(*range(20)), InvalidArgument, "batch-size must be <= 4"),
        (line(1, 2, parameters={"binary_data_size": 8}).replace('"data": [1, 2], ', ""), InvalidArgument, "supported"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, text: str, kind: type[NeriteError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        made(tmp_path, f"{line(1, 2)}\n{text}\n")
    remedy = "The recorded request at warmup/requests.jsonl:2 is invalid."
    assert caught.value.message.endswith(f"\n    {remedy}")
    (mistake,) = warm_up.recorded_mistakes(NAMED, SIGNATURE, tmp_path, infer_request.read_recorded_request)
    assert (mistake.path, mistake.remedy, mistake.error) == (("parameters", "WARMUP_REQUESTS"), remedy, kind)
    assert message in mistake.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Internal, match=r"requests\.jsonl: No such file"):
        warm_up.recorded_samples(NAMED, SIGNATURE, tmp_path, infer_request.read_recorded_request)
    (mistake,) = warm_up.recorded_mistakes(NAMED, SIGNATURE, tmp_path, infer_request.read_recorded_request)
    assert "No such file" in mistake.message


def test_a_file_elsewhere(tmp_path: Path) -> None:
    config = ModelConfig(parameters={"WARMUP_REQUESTS": ModelParameter(string_value="../secrets")})
    with pytest.raises(InvalidArgument, match="of parameter 'WARMUP_REQUESTS' must stay within"):
        warm_up.recorded_samples(config, SIGNATURE, tmp_path, infer_request.read_recorded_request)


def test_what_the_documents_show(tmp_path: Path) -> None:
    signature = Signature("chat", 0, [SignatureInput("prompt", dtypes.BYTES, (1,))], [])
    (sample,) = made(tmp_path, Page("docs/repositories.md").block('"name": "prompt"'), signature)
    assert b"How are you?" in bytes(sample.data[0])
