"""Instances of models that synthesize speech, generate images or classify texts, with stand-ins for their engines."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from nerite.backends.interface import ExecutionTimes, ModelContext
from nerite.core import tensor
from nerite.core.errors import Cancelled, InvalidArgument
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import from_array, to_array
from nerite.llm import backend, checkpoint
from nerite.llm.classification import ClassificationInstance
from nerite.llm.image_generation import ImageGenerationInstance, ImageSettings, png, read_image_settings
from nerite.llm.openai.speech import pcm, wav_head
from nerite.llm.speech import SpeechInstance


class Dropped:
    """A sink for requests whose responses are returned."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        raise AssertionError("responses are returned")


def context(tmp_path: Path, task: str) -> ModelContext:
    plain = ModelContext("m", 1, tmp_path, {"backend": "llm"})
    return ModelContext("m", 1, tmp_path, backend.completed_config(plain, task))


def asked(**given: Any) -> InferenceRequest:
    tensors = []
    for name, value in given.items():
        array = np.array([value.encode()], tensor.BYTES.numpy) if isinstance(value, str) else np.array([value])
        tensors.append(from_array(name, array))
    sink: Any = Dropped()
    return InferenceRequest(RequestHeader("m", "1", [spec for spec, _ in tensors]), [d for _, d in tensors], sink, 0)


def outputs(response: InferenceResponse) -> dict[str, Any]:
    assert response.header is not None, response.error
    return {spec.name: to_array(spec, data) for spec, data in zip(response.header.outputs, response.data, strict=True)}


class Voice:
    """Says as many samples as a text has letters."""

    def synthesize(self, text: str, voice: str) -> tuple[Any, int]:
        if voice == "none":
            raise InvalidArgument("no such voice")
        return np.full(len(text), 0.5, np.float32), 8000

    def close(self) -> None:
        """Do nothing."""


def test_speech(tmp_path: Path) -> None:
    instance = SpeechInstance(context(tmp_path, checkpoint.TEXT_TO_SPEECH), Voice())
    said, refused = instance.execute([asked(text_input="abc"), asked(text_input="a", voice="none")], ExecutionTimes())
    assert outputs(said)["audio"].tolist() == [0.5] * 3
    assert outputs(said)["sample_rate"].tolist() == [8000]
    assert refused.error is not None
    assert refused.error.message == "no such voice"


def test_speech_that_nobody_waits_for(tmp_path: Path) -> None:
    request = asked(text_input="abc")

    class Slow(Voice):
        def synthesize(self, text: str, voice: str) -> tuple[Any, int]:
            request.cancel()
            return super().synthesize(text, voice)

    instance = SpeechInstance(context(tmp_path, checkpoint.TEXT_TO_SPEECH), Slow())
    (response,) = instance.execute([request], ExecutionTimes())
    assert isinstance(response.error, Cancelled)


def test_files_of_speech() -> None:
    assert pcm(np.array([0, 1, -2, np.nan], np.float32)) == np.array([0, 32767, -32767, 0], "<i2").tobytes()
    assert len(wav_head(4, 8000)) == 44


class Brush:
    """Draws as many steps as are wanted, unless it is told to stop."""

    def __init__(self, stops_at: int = -1) -> None:
        self.settings = ImageSettings()
        self.steps = 0
        self.request: InferenceRequest | None = None
        self.stops_at = stops_at

    def generate(self, text: str, settings: ImageSettings, goes_on: Callable[[], bool]) -> Any:
        self.settings = settings
        for step in range(settings.steps):
            if step == self.stops_at and self.request is not None:
                self.request.cancel()
            if not goes_on():
                break
            self.steps += 1
        return np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)

    def close(self) -> None:
        """Do nothing."""


def test_images(tmp_path: Path) -> None:
    brush = Brush()
    instance = ImageGenerationInstance(context(tmp_path, checkpoint.TEXT_TO_IMAGE), brush)
    request = asked(
        text_input="a", negative_prompt="b", width=np.int32(8), height=np.int32(16), num_inference_steps=np.int32(3),
        guidance_scale=np.float32(2.5), seed=np.int64(9),
    )  # fmt: skip
    (response,) = instance.execute([request], ExecutionTimes())
    assert brush.settings == ImageSettings(8, 16, 3, 2.5, 9, "b")
    pixels = np.array(PIL.Image.open(io.BytesIO(outputs(response)["image"][0])))
    assert pixels.reshape(-1).tolist() == list(range(18))


def test_an_image_that_nobody_waits_for(tmp_path: Path) -> None:
    brush = Brush(stops_at=2)
    instance = ImageGenerationInstance(context(tmp_path, checkpoint.TEXT_TO_IMAGE), brush)
    brush.request = request = asked(text_input="a", num_inference_steps=np.int32(100))
    (response,) = instance.execute([request], ExecutionTimes())
    assert isinstance(response.error, Cancelled)
    assert brush.steps == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"width": np.int32(2049)}, "'width' is 2049; it must be from 8 to 2048"),
        ({"num_inference_steps": np.int32(0)}, "'num_inference_steps' is 0"),
        ({"guidance_scale": np.float32(-1)}, "'guidance_scale' is -1.0"),
    ],
)
def test_settings_of_images_that_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_image_settings({name: np.array([value]) for name, value in given.items()})
    assert text in caught.value.message


def test_a_large_image_is_a_file() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 30, 3), np.uint8)
    assert np.array_equal(np.array(PIL.Image.open(io.BytesIO(png(pixels)))), pixels)


class Sorter:
    """Knows long texts from short ones."""

    labels = ("short", "long")

    def tokens(self, texts: Sequence[str]) -> list[int]:
        if any(not text for text in texts):
            raise InvalidArgument("the text is empty")
        return [len(text) for text in texts]

    def probabilities(self, texts: Sequence[str]) -> Any:
        return np.array([[1, 0] if len(text) < 3 else [0.25, 0.75] for text in texts], np.float32)

    def close(self) -> None:
        """Do nothing."""


def test_classes(tmp_path: Path) -> None:
    instance = ClassificationInstance(context(tmp_path, checkpoint.CLASSIFY), Sorter())
    texts = ("a", "", "abcd")
    first, empty, last = instance.execute([asked(text_input=text) for text in texts], ExecutionTimes())
    assert outputs(first)["label"].tolist() == [[b"short"]]
    assert outputs(last)["scores"].tolist() == [[0.25, 0.75]]
    assert outputs(last)["num_input_tokens"].tolist() == [[4]]
    assert empty.error is not None
    assert empty.error.message == "the text is empty"
