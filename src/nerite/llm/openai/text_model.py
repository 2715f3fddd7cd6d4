"""Recognizes text models by their signature, fills in their inputs, and reads their responses."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from nerite.config.sticky_key import KeySource
from nerite.core import tensor as dtypes
from nerite.core.request import NOBODY, Assignment, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, Parameter
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import Buffer, DataType, TensorSpec, join_bytes
from nerite.llm import checkpoint
from nerite.llm.openai.sampling import Sampling, SamplingSetting, not_offered, written
from nerite.scheduling.weighted_route import WeightedRoute
from nerite.transports.access import SenderHeaders

PROMPT: Final = "text_input"
TEXT_OUTPUT: Final = "text_output"
SAMPLING: Final = "sampling_parameters"
IMAGE: Final = "image"
SPECIAL: Final = "add_special_tokens"
EMBEDDING: Final = "embedding"
TOKENS: Final = "prompt_token_ids"
"""Input for a prompt that is token ids, and output for the ids of a prompt's tokens."""
_REPORTED: Final = ("finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
_FLAGS: Final = (
    "stream",
    "exclude_input_in_output",
    "return_logprobs",
    "return_cumulative_logprob",
    "return_token_ids",
    "return_prompt_token_ids",
    "return_prompt_logprobs",
    *(f"return_{name}" for name in _REPORTED),
)
_KNOWN_INPUTS: Final = {PROMPT, TOKENS, SAMPLING, IMAGE, SPECIAL, *_FLAGS}
NEEDS: Final = (
    f"it needs an input '{PROMPT}' (BYTES, one element), an output '{TEXT_OUTPUT}' (BYTES), and no other required "
    "input except those of Triton's vLLM backend"
)


def is_text(signature: Signature) -> bool:
    """Return whether a model turns text into text. The text output of an embedding model does not count."""
    return (
        _takes_text(signature)
        and has_type(signature.outputs.get(TEXT_OUTPUT), dtypes.BYTES)
        and not is_embedding(signature)
    )


def is_embedding(signature: Signature) -> bool:
    """Return whether a model turns text into a vector."""
    return _takes_text(signature) and has_type(signature.outputs.get(EMBEDDING), dtypes.FP32)


def _takes_text(signature: Signature) -> bool:
    prompt = signature.inputs.get(PROMPT)
    return (
        prompt is not None
        and prompt.datatype is dtypes.BYTES
        and all(size in (1, -1) for size in prompt.dims)
        and signature.required <= _KNOWN_INPUTS
    )


def needs_prompt_only(signature: Signature) -> bool:
    """Return whether a prompt is all that a model needs."""
    return has_type(signature.inputs.get(PROMPT), dtypes.BYTES) and signature.required <= {PROMPT}


def has_type(declared: SignatureInput | SignatureOutput | None, datatype: DataType) -> bool:
    """Return whether an input or output exists and has a type."""
    return declared is not None and declared.datatype is datatype


class ModelPurpose(NamedTuple):
    """What a model is for, which its signature says."""

    serves: Callable[[Signature], bool]
    """Returns whether a model with a signature is for this."""
    lack: str
    """What is wrong with a model that is not, as the end of a sentence."""
    task: str
    """What such a model does, in the words of the parameter ``TASK``."""


TEXT: Final = ModelPurpose(is_text, f"is not a text model: {NEEDS}", checkpoint.GENERATE)


class Strings:
    """Strings in the encoding of a BYTES tensor."""

    __slots__ = ("_count", "data")

    def __init__(self, strings: Sequence[bytes | memoryview]) -> None:
        self.data: Buffer = join_bytes(strings)
        self._count = len(strings)

    def __len__(self) -> int:
        """Return the number of strings."""
        return self._count


class TokenIds(Strings):
    """A prompt that is token ids, as JSON."""

    __slots__ = ()


_NO_TEXT: Final = Strings([b""])


class ModelRequest(NamedTuple):
    """Header and tensor data of a request to a model."""

    header: RequestHeader
    data: list[Buffer]


class ModelAddress(NamedTuple):
    """The model that answers a call: the one that was asked for, or the arm of its route."""

    model: str
    version: str = ""
    assignment: Assignment | None = None
    lora: str = ""
    """The LoRA adapter that was asked for by its name."""

    def header(
        self,
        specs: Sequence[TensorSpec],
        parameters: dict[str, Parameter],
        sender: SenderHeaders,
        priority: int = 0,
    ) -> RequestHeader:
        """Return the header of a request with these inputs."""
        return RequestHeader(
            self.model,
            self.version,
            specs,
            parameters=parameters,
            priority=priority,
            caller=sender.caller,
            assignment=self.assignment,
        )


class CallOrigin(NamedTuple):
    """What keeps a call on an arm of a route."""

    sender: SenderHeaders
    user: str
    opening: Callable[[int], bytes]
    """Returns the beginning of the prompt, of at least so many bytes if it is that long."""
    requests: int = 1
    """Number of requests of the call, which all go to the same arm."""

    def probe(self, route: WeightedRoute) -> InferenceRequest:
        """Return a request with the parts that its key may be made from."""
        sender = self.sender
        header = RequestHeader(
            route.name,
            "",
            [TensorSpec(PROMPT, dtypes.BYTES, (1,))],
            parameters={**sender.forwarded, **({"user": self.user} if self.user else {})},
            caller=sender.caller,
            idempotency_key=sender.idempotency_key,
            sticky_fields=sender.sticky_fields,
        )
        sizes = [key.size for key in route.sticky if key.source is KeySource.PROMPT]
        opening = Strings([self.opening(max(sizes))]).data if sizes else b""
        return InferenceRequest(header, [opening], NOBODY, 0)


class TextModel:
    """Builds requests to a text model according to its signature."""

    def __init__(self, name: str, signature: Signature, address: ModelAddress | None = None) -> None:
        """``name`` is the model that was asked for."""
        self._address = address or ModelAddress(name)
        self.name = name
        self._signature = signature

    @property
    def takes_sampling(self) -> bool:
        """Whether the model takes sampling parameters as an input."""
        return SAMPLING in self._signature.inputs

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return IMAGE in self._signature.inputs

    @property
    def takes_special(self) -> bool:
        """Whether a request can disable special tokens for its prompt."""
        return SPECIAL in self._signature.inputs

    @property
    def takes_tokens(self) -> bool:
        """Whether a prompt may be token ids, and the ids of tokens are reported."""
        return TOKENS in self._signature.inputs

    @property
    def gives_prompt_logprobs(self) -> bool:
        """Whether the model can report log probabilities of the tokens of a prompt."""
        return self.gives_logprobs and "prompt_logprobs" in self._signature.outputs

    @property
    def gives_logprobs(self) -> bool:
        """Whether the model can report log probabilities."""
        return "logprobs" in self._signature.outputs and self.takes_sampling

    def ask(
        self,
        prompt: Strings,
        sampling: Sampling,
        sender: SenderHeaders,
        *,
        stream: bool = False,
        special: bool = True,
        images: Strings | None = None,
        priority: int = 0,
        returned: Sequence[str] = (),
        echo: bool = False,
    ) -> ModelRequest:
        """Return the request for a prompt. Raises ``ApiError`` for settings that the model has no input for.

        Without ``special`` no special tokens are added to the prompt, if the model supports that. ``returned`` are
        outputs that are wanted. ``echo``: the text begins with the prompt. Several requests may share ``prompt`` and
        ``images``, which are not copied.
        """
        specs: list[TensorSpec] = []
        data: list[Buffer] = []
        parameters: dict[str, Parameter] = dict(sender.forwarded)

        def add(name: str, elements: Sequence[Any] | Strings) -> None:
            declared = self._signature.inputs.get(name)
            if declared is None:
                return
            specs.append(TensorSpec(name, declared.datatype, self._shape(declared, len(elements))))
            if isinstance(elements, Strings):
                data.append(elements.data)
            elif declared.datatype is dtypes.BYTES:
                data.append(join_bytes(elements))
            else:
                data.append(np.array(elements, declared.datatype.numpy).tobytes())

        if isinstance(prompt, TokenIds):
            add(PROMPT, _NO_TEXT)
            add(TOKENS, prompt)
        else:
            add(PROMPT, prompt)
        if self._address.lora:
            sampling = {"lora_name": SamplingSetting(self._address.lora, "model"), **sampling}
        if self.takes_sampling:
            add(SAMPLING, [written(sampling)])
        else:
            parameters |= self._parameters(sampling)
        if images is not None:
            add(IMAGE, images)
        add("stream", [stream])
        add("exclude_input_in_output", [not echo])
        if not special:
            add(SPECIAL, [False])
        for name in _REPORTED:
            if name in self._signature.outputs:
                add(f"return_{name}", [True])
        for name in returned:
            add(f"return_{name}", [True])
        return ModelRequest(self._address.header(specs, parameters, sender, priority), data)

    def _parameters(self, sampling: Sampling) -> dict[str, Parameter]:
        """Return settings as request parameters, which a model may read; only scalar values are possible there."""
        for name, setting in sampling.items():
            if name in ("guided_decoding", "structured_outputs") or type(setting.value) not in (bool, int, float, str):
                raise not_offered(
                    setting.param, f"model '{self.name}' has no input '{SAMPLING}' to pass it to the model"
                )
        return {name: setting.value for name, setting in sampling.items()}

    def _shape(self, declared: SignatureInput, count: int) -> tuple[int, ...]:
        dims = tuple(count if size == -1 else size for size in declared.dims)
        if math.prod(dims) != count:
            dims = declared.dims
        return (1, *dims) if self._signature.max_batch_size else dims


class TextDelta(NamedTuple):
    """Content of one response of a model; fields that the response lacks have their defaults."""

    text: bytes = b""
    finish_reason: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    logprobs: str = ""
    cached_tokens: int | None = None
    token_ids: Sequence[int] = ()
    prompt_ids: list[int] | None = None
    prompt_logprobs: str = ""


class TokenCounts:
    """Tokens of one request so far, as its responses report them; None until one does."""

    __slots__ = ("cached", "input", "output")

    def __init__(self) -> None:
        self.input: int | None = None
        self.output: int | None = None
        self.cached: int | None = None

    def add(self, delta: TextDelta) -> None:
        """Count a response."""
        if delta.input_tokens is not None:
            self.input = delta.input_tokens
        if delta.output_tokens is not None:
            self.output = (self.output or 0) + delta.output_tokens
        if delta.cached_tokens is not None:
            self.cached = delta.cached_tokens

    def span_attributes(self, operation: str, model: str) -> dict[str, str | int]:
        """Return the span attributes of the request by OpenTelemetry's conventions for language models."""
        attributes: dict[str, str | int] = {"gen_ai.operation.name": operation, "gen_ai.request.model": model}
        counts = {"input": self.input, "output": self.output}
        return attributes | {
            f"gen_ai.usage.{name}_tokens": count for name, count in counts.items() if count is not None
        }


_ID_LISTS: Final = {"token_ids": "token_ids", "prompt_token_ids": "prompt_ids"}
"""Outputs with token ids in JSON, and the fields of ``TextDelta``."""


def read(response: InferenceResponse) -> TextDelta:
    """Return the content of a successful response. Runs for every token, so it creates no arrays.

    Raises ``ValueError`` if a count is not an integer.
    """
    text, reason, likely = b"", b"", b""
    input_tokens = output_tokens = None
    more: dict[str, Any] = {}
    if response.header is not None:
        for spec, data in zip(response.header.outputs, response.buffers, strict=True):
            name = spec.name
            if name == TEXT_OUTPUT:
                text = b"".join(_strings(data))
            elif name == "finish_reason":
                reason = next(_strings(data), b"")
            elif name == "num_input_tokens":
                input_tokens = next(_numbers(spec, data), None)
            elif name == "num_output_tokens":
                output_tokens = sum(_numbers(spec, data))
            elif name == "logprobs":
                likely = next(_strings(data), b"")
            elif name == "num_cached_tokens":
                count = next(_numbers(spec, data), -1)
                more["cached_tokens"] = count if count >= 0 else None
            elif name in _ID_LISTS:
                more[_ID_LISTS[name]] = orjson.loads(next(_strings(data), b"null")) or ()
            elif name == "prompt_logprobs":
                more[name] = next(_strings(data), b"").decode(errors="replace")
    # Triton's vLLM backend writes "None" while a sequence is not finished.
    finish_reason = "" if reason == b"None" else reason.decode(errors="replace")
    return TextDelta(text, finish_reason, input_tokens, output_tokens, likely.decode(errors="replace"), **more)


def text_of(data: Buffer) -> bytes:
    """Return the elements of a BYTES tensor as one text."""
    return b"".join(_strings(data))


def _strings(data: Buffer) -> Iterator[bytes]:
    raw, at = bytes(data), 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        yield raw[at + 4 : end]
        at = end


def _numbers(spec: TensorSpec, data: Buffer) -> Iterator[int]:
    size = spec.datatype.size
    if spec.datatype.numpy.kind not in "iu":
        raise ValueError(f"the output '{spec.name}' is {spec.datatype.name}, but must be of an integer type")
    for at in range(0, len(data), size):
        yield int.from_bytes(data[at : at + size], "little", signed=spec.datatype.numpy.kind == "i")


def decoder() -> codecs.IncrementalDecoder:
    """Return an incremental UTF-8 decoder, because texts may end within a character."""
    return codecs.getincrementaldecoder("utf-8")("replace")
