from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import Caller
from nerite.config.model_config import ModelConfig, ModelWarmup
from nerite.config.text import parse_text
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.signature import Signature, SignatureInput
from nerite.models.warm_up import WarmUpSample, configured_samples
from pages import Page

BIG = 4


def warmup(batch_size: int = 1, name: str = "s", count: int = 0, **fields: Any) -> ModelWarmup:
    fields = {"data_type": "TYPE_INT32", "dims": (2,), **fields}
    return ModelWarmup(name=name, batch_size=batch_size, count=count, inputs={"IN": ModelWarmup.Input(**fields)})


def made(
    folder: Path, *warmups: ModelWarmup, datatype: str = "INT32", dims: tuple[int, ...] = (2,), limit: int = BIG
) -> list[WarmUpSample]:
    signature = Signature("m", limit, [SignatureInput("IN", dtypes.BY_NAME[datatype], dims)], [])
    return configured_samples(ModelConfig(model_warmup=warmups), signature, folder, lambda _: None)


def test_zeros(tmp_path: Path) -> None:
    (sample,) = made(tmp_path, warmup(3, count=2, zero_data=True))
    assert (sample.name, sample.rows, sample.times, sample.data) == ("s", 3, 2, [bytes(8)])
    assert [spec.shape for spec in sample.header.inputs] == [(1, 2)]
    requests = sample.requests(Caller(), 7)
    assert len(requests) == 3
    requests[0].data[0][:] = b"x" * 8  # type: ignore[index]  # a model that works in place
    assert bytes(requests[1].data[0]) == sample.data[0] == bytes(8)


def test_without_batches(tmp_path: Path) -> None:
    (sample,) = made(tmp_path, warmup(zero_data=True), limit=0)
    assert sample.header.inputs[0].shape == (2,)


@pytest.mark.parametrize("datatype", [each for each in dtypes.ALL if each is not dtypes.BYTES])
def test_random_numbers(tmp_path: Path, datatype: dtypes.DataType) -> None:
    fields: dict[str, Any] = {"data_type": datatype.config_name, "dims": (1000,), "random_data": True}
    (sample,) = made(tmp_path, warmup(**fields), datatype=datatype.name, dims=(-1,))
    numbers = np.frombuffer(sample.data[0], datatype.numpy)
    assert len(numbers) == 1000
    assert len(set(numbers.tolist())) > 1
    if datatype is dtypes.BOOL:
        assert set(sample.data[0]) == {0, 1}
    elif datatype.numpy.kind == "f":
        assert np.all((numbers >= 0) & (numbers <= 1))


@pytest.mark.parametrize("kind", ["zero_data", "random_data"])
def test_texts_are_empty(tmp_path: Path, kind: str) -> None:
    fields: dict[str, Any] = {"data_type": "TYPE_STRING", kind: True}
    (sample,) = made(tmp_path, warmup(**fields), datatype="BYTES")
    assert sample.data == [bytes(8)]


def test_files(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "numbers").write_bytes(struct.pack("<3i", 5, 6, 7))
    (sample,) = made(tmp_path, warmup(input_data_file="numbers"))
    assert sample.data == [struct.pack("<2i", 5, 6)]


def test_what_the_documents_show(tmp_path: Path) -> None:
    config = parse_text(Page("docs/repositories.md").block("model_warmup"), "config.pbtxt").config
    signature = Signature("m", BIG, [SignatureInput("image", dtypes.FP32, (3, 224, 224))], [])
    (sample,) = configured_samples(config, signature, tmp_path, lambda _: None)
    assert (sample.name, len(sample.data[0])) == ("one image", 602_112)


def test_what_has_no_rows_is_skipped(tmp_path: Path) -> None:
    told: list[str] = []
    config = ModelConfig(model_warmup=(warmup(0, name="none", zero_data=True),))
    assert configured_samples(config, Signature("m", BIG, [], []), tmp_path, told.append) == []
    assert told == ["none"]


@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        (
            warmup(5, zero_data=True),
            InvalidArgument,
            "failed to run warmup sample 's': batch size 5 for 'm', max allowed is 4; ",
        ),
        (
            warmup(dims=(-1,), zero_data=True),
            InvalidArgument,
            "warmup setting expects all variable-size dimensions are specified",
        ),
        (
            warmup(),
            InvalidArgument,
            "[request id: <id_unknown>] warmup setting expects input 'IN' to have input_data_type set",
        ),
        (
            warmup(dims=(3,), zero_data=True),
            InvalidArgument,
            "[request id: <id_unknown>] unexpected shape for input 'IN'",
        ),
        (
            warmup(data_type="TYPE_FP32", zero_data=True),
            InvalidArgument,
            "[request id: <id_unknown>] inference input 'IN' data-type is 'FP32'",
        ),
        (
            warmup(input_data_file="none"),
            Internal,
            "failed to open text file for read {folder}/warmup/none: No such file",
        ),
        (
            warmup(input_data_file="short"),
            InvalidArgument,
            "[request id: <id_unknown>] warmup setting expects 8 bytes, but the data provided from short only has 4",
        ),
        (
            warmup(input_data_file="../other"),
            InvalidArgument,
            "warmup data file '../other' of input 'IN' must stay within {folder}/warmup",
        ),
    ],
)
def test_what_cannot_be_made(tmp_path: Path, mistake: ModelWarmup, kind: type[NeriteError], text: str) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(b"1234")
    (tmp_path / "other").write_bytes(bytes(8))
    with pytest.raises(kind) as caught:
        made(tmp_path, mistake)
    assert caught.value.message.startswith(text.format(folder=tmp_path))
    assert caught.value.message.endswith("\n    The sample 's' of 'model_warmup' is invalid.")


def test_a_file_of_texts_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "texts").write_bytes(b"\x09\0\0\0ab")
    with pytest.raises(InvalidArgument, match="IN"):
        made(tmp_path, warmup(data_type="TYPE_STRING", input_data_file="texts"), datatype="BYTES")
