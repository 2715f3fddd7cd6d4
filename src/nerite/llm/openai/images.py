"""``/v1/images/generations``: reads the body, and writes the images."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson

from nerite.core import tensor as dtypes
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec, join_bytes
from nerite.llm.image_generation import LARGEST, MAX_STEPS
from nerite.llm.openai.exchange import JointWork
from nerite.llm.openai.fields import ApiError, Fields, UnknownField, wrong_value
from nerite.llm.openai.sampling import not_offered
from nerite.llm.openai.text_model import IMAGE, PROMPT, ModelAddress, ModelRequest, text_of
from nerite.transports.access import SenderHeaders
from nerite.transports.http.reply import Reply

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

NEEDS: Final = f"it needs an input '{PROMPT}' (BYTES) and an output '{IMAGE}' (BYTES)"
_MOST: Final = 10
"""Maximum number of images per request, as with OpenAI."""
_LONGEST: Final = 32_000
"""Maximum number of characters of a prompt, as with OpenAI."""
_SIZE: Final = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})")
_KNOWN: Final = (
    *("model", "prompt", "n", "size", "response_format", "output_format", "stream", "user"),
    *("negative_prompt", "num_inference_steps", "guidance_scale", "seed"),
    # Without influence here:
    *("quality", "style", "background", "moderation", "output_compression", "partial_images"),
)


def generates_images(signature: Signature) -> bool:
    """Return whether a model turns a prompt into an image file."""
    text, image = signature.inputs.get(PROMPT), signature.outputs.get(IMAGE)
    return (
        text is not None
        and text.datatype is dtypes.BYTES
        and signature.required <= {PROMPT}
        and image is not None
        and image.datatype is dtypes.BYTES
    )


class ImageRequest(NamedTuple):
    """The parsed body of a request for images."""

    model: str
    prompt: bytes
    n: int = 1
    size: tuple[int, int] = (0, 0)
    """Width and height; zeros: the model's usual size."""
    avoided: str = ""
    steps: int = 0
    guidance: float = -1.0
    """Negative: as the model does it."""
    seed: int = -1
    user: str = ""
    unknown: Sequence[UnknownField] = ()
    """Fields of the body that were passed over."""


def read_images(body: Buffer) -> ImageRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_KNOWN)
    prompt, avoided = fields.text("prompt"), fields.text("negative_prompt", "")
    for name, text in (("prompt", prompt), ("negative_prompt", avoided)):
        if len(text) > _LONGEST:
            raise ApiError(
                f"Invalid '{name}': string too long. Expected a string with maximum length {_LONGEST}, but got a "
                f"string with length {len(text)} instead.",
                name,
                "string_above_max_length",
            )
    if not prompt:
        raise wrong_value("prompt", "a text", prompt)
    fields.choice("response_format", "b64_json", ("b64_json",))
    fields.choice("output_format", "png", ("png",))
    if fields.flag("stream"):
        raise not_offered("stream", "images are sent when they are complete")
    return ImageRequest(
        fields.name("model"),
        prompt.encode(),
        fields.integer("n", 1, 1, _MOST),
        _size(fields.text("size", "auto")),
        avoided,
        fields.integer("num_inference_steps", 1, 1, MAX_STEPS) if "num_inference_steps" in fields else 0,
        fields.number("guidance_scale", 0.0, 100.0) if "guidance_scale" in fields else -1.0,
        fields.integer("seed", 0, 0, 2**63 - 1) if "seed" in fields else -1,
        fields.name("user", ""),
        fields.unknown,
    )


def _size(text: str) -> tuple[int, int]:
    if text == "auto":
        return 0, 0
    found = _SIZE.fullmatch(text)
    if found is None or max(map(int, found.groups())) > LARGEST:
        raise wrong_value("size", f"'auto', or width and height of at most {LARGEST} such as '512x512'", text)
    return int(found[1]), int(found[2])


def image_requests(
    asked: ImageRequest, signature: Signature, sender: SenderHeaders, address: ModelAddress
) -> list[ModelRequest]:
    """Return a request to the model for each image; with a seed each has its own, counted up from it.

    Raises ``ApiError`` for settings that the model has no input for.
    """
    rows = (1,) if signature.max_batch_size else ()
    width, height = asked.size
    given: list[tuple[str, str, Any]] = [
        ("negative_prompt", "negative_prompt", asked.avoided or None),
        ("width", "size", width or None),
        ("height", "size", height or None),
        ("num_inference_steps", "num_inference_steps", asked.steps or None),
        ("guidance_scale", "guidance_scale", asked.guidance if asked.guidance >= 0 else None),
        ("seed", "seed", asked.seed if asked.seed >= 0 else None),
    ]
    specs = [TensorSpec(PROMPT, dtypes.BYTES, (*rows, 1))]
    data: list[Buffer] = [join_bytes([asked.prompt])]
    seed: int | None = None
    for name, param, value in given:
        if value is None:
            continue
        declared = signature.inputs.get(name)
        if declared is None:
            raise not_offered(param, f"model '{asked.model}' has no input '{name}' to pass it to the model")
        specs.append(TensorSpec(name, declared.datatype, (*rows, 1)))
        if declared.datatype is dtypes.BYTES:
            data.append(join_bytes([str(value).encode()]))
        else:
            data.append(np.array([value], declared.datatype.numpy).tobytes())
        if name == "seed":
            seed = len(data) - 1
    header = address.header(specs, dict(sender.forwarded), sender)
    made = []
    for number in range(asked.n):
        own = list(data)
        if seed is not None:
            own[seed] = np.array([(asked.seed + number) % 2**63], specs[seed].datatype.numpy).tobytes()
        made.append(ModelRequest(header, own))
    return made


class ImageExchange(JointWork):
    """An exchange for images, with one model request for each."""

    fields = MappingProxyType(
        {"text_input": "prompt", "width": "size", "height": "size", "negative_prompt": "negative_prompt"}
    )

    def __init__(self, connection: HttpExchange, asked: ImageRequest) -> None:
        super().__init__(connection)
        self._made = int(time.time())
        self._images: list[bytes] = [b""] * asked.n
        self._left = asked.n

    def _take(self, place: int, response: InferenceResponse, final: bool) -> None:
        if response.header is not None:
            for spec, data in zip(response.header.outputs, response.data, strict=True):
                if spec.name == IMAGE:
                    self._images[place] = base64.b64encode(text_of(data))
        if not final:
            return
        if not self._images[place]:
            raise ApiError("The model returned no image.", None, None, 500)
        self._left -= 1
        if self._left:
            return
        self._closed = True
        head = orjson.dumps({"created": self._made, "output_format": "png"})[:-1]
        data = b",".join(b'{"b64_json":"%b"}' % image for image in self._images)
        self._connection.send([Reply(200, b'%b,"data":[%b]}' % (head, data)).encode()])
