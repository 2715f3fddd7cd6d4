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
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec, join_bytes
from nerite.llm import checkpoint
from nerite.llm.image_generation import LARGEST, MAX_STEPS
from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields, UnknownField, check_text_length, wrong_value
from nerite.llm.openai.replies import Outputs, WholeReply
from nerite.llm.openai.sampling import not_offered
from nerite.llm.openai.text_model import (
    IMAGE,
    PROMPT,
    CallOrigin,
    ModelAddress,
    ModelPurpose,
    ModelRequest,
    has_type,
    needs_prompt_only,
    text_of,
)
from nerite.transports.access import SenderHeaders

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange

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
    return needs_prompt_only(signature) and has_type(signature.outputs.get(IMAGE), dtypes.BYTES)


PURPOSE: Final = ModelPurpose(
    generates_images,
    f"does not generate images: it needs an input '{PROMPT}' (BYTES) and an output '{IMAGE}' (BYTES)",
    checkpoint.TEXT_TO_IMAGE,
)


class ImageRequest(NamedTuple):
    """The parsed body of a request for images."""

    model: str
    prompt: bytes | memoryview
    n: int = 1
    size: Sequence[int] = (0, 0)
    """Width and height; zeros: the model's usual size."""
    avoided: str = ""
    steps: int = 0
    guidance: float = -1.0
    """Negative: as the model does it."""
    seed: int = -1
    user: str = ""
    unknown: Sequence[UnknownField] = ()
    """Fields of the body that were passed over."""

    def origin(self, sender: SenderHeaders) -> CallOrigin:
        """Return what keeps the request on an arm of a route."""
        return CallOrigin(sender, self.user, lambda _: bytes(self.prompt), self.n)

    def model_requests(self, signature: Signature, sender: SenderHeaders, address: ModelAddress) -> list[ModelRequest]:
        """Return a request to the model for each image; with a seed each has its own, counted up from it.

        Raises ``ApiError`` for settings that the model has no input for.
        """
        rows = (1,) if signature.max_batch_size else ()
        width, height = self.size
        given: list[tuple[str, str, Any]] = [
            ("negative_prompt", "negative_prompt", self.avoided or None),
            ("width", "size", width or None),
            ("height", "size", height or None),
            ("num_inference_steps", "num_inference_steps", self.steps or None),
            ("guidance_scale", "guidance_scale", self.guidance if self.guidance >= 0 else None),
            ("seed", "seed", self.seed if self.seed >= 0 else None),
        ]
        specs = [TensorSpec(PROMPT, dtypes.BYTES, (*rows, 1))]
        data: list[Buffer] = [join_bytes([self.prompt])]
        seed: int | None = None
        for name, param, value in given:
            if value is None:
                continue
            declared = signature.inputs.get(name)
            if declared is None:
                raise not_offered(param, f"model '{self.model}' has no input '{name}' to pass it to the model")
            specs.append(TensorSpec(name, declared.datatype, (*rows, 1)))
            if declared.datatype is dtypes.BYTES:
                data.append(join_bytes([str(value).encode()]))
            else:
                data.append(np.array([value], declared.datatype.numpy).tobytes())
            if name == "seed":
                seed = len(data) - 1
        header = address.header(specs, dict(sender.forwarded), sender)
        made = []
        for number in range(self.n):
            own = list(data)
            if seed is not None:
                own[seed] = np.array([(self.seed + number) % 2**63], specs[seed].datatype.numpy).tobytes()
            made.append(ModelRequest(header, own))
        return made

    def reply(self, connection: HttpExchange, name: str, signature: Signature) -> ImagesReply:
        """Return the sink of these requests."""
        return ImagesReply(connection, self.n)


def read_images(body: Buffer) -> ImageRequest:
    """Read a body. Raises ``ApiError``."""
    fields = Fields.of_body(body)
    fields.pass_over_unknown(_KNOWN)
    prompt, avoided = fields.text("prompt"), fields.text("negative_prompt", "")
    check_text_length("prompt", prompt, _LONGEST)
    check_text_length("negative_prompt", avoided, _LONGEST)
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


class ImagesReply(WholeReply):
    """Images, with one model request for each."""

    fields = MappingProxyType(
        {"text_input": "prompt", "width": "size", "height": "size", "negative_prompt": "negative_prompt"}
    )

    def __init__(self, connection: HttpExchange, count: int) -> None:
        super().__init__(connection)
        self._made = int(time.time())
        self._images: list[bytes] = [b""] * count

    def _add(self, place: int, outputs: Outputs) -> None:
        if IMAGE in outputs:
            self._images[place] = base64.b64encode(text_of(outputs[IMAGE][1]))

    def _check(self, place: int) -> None:
        if not self._images[place]:
            raise ApiError("The model returned no image.", None, None, 500)

    def _encoded(self) -> bytes:
        head = orjson.dumps({"created": self._made, "output_format": "png"})[:-1]
        data = b",".join(b'{"b64_json":"%b"}' % image for image in self._images)
        return b'%b,"data":[%b]}' % (head, data)
