"""State of requests in the engine: sequences, detokenization, image token counts. For the engine's thread only.

Each of the ``n`` sequences of a request is a separate request to the pipeline, because the pipeline returns several
sequences of one request only when all are done, and cannot end one alone. With prefix caching, their prompt is computed
once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias
from xml.etree import ElementTree

import numpy as np

from nerite.core.errors import NeriteError
from nerite.llm.demand import IMAGE_TOKENS
from nerite.llm.engine import FinishReason, GenerationRequest, RequestListener, TokenDelta, TokenLogprob
from nerite.llm.openvino_genai.messages import GenerationOrder, Piece
from nerite.llm.streaming import TextStream

# Detokenization without the framework, for tokenizers whose text is the concatenated bytes of the tokens. That is the
# case for most language models (byte-level BPE). The framework's detokenizer network contains the bytes of all tokens;
# running it takes 0.4 ms after each step, when caches are cold.

_NETWORK: Final = "openvino_detokenizer.xml"
_DECODER: Final = "VocabDecoder"
_PLAIN: Final = frozenset(
    {"Parameter", "Const", "Convert", _DECODER, "FuzeRagged", "UTF8Validate", "StringTensorPack", "Result"}
)
"""Operations of a network that only concatenates bytes. Any other operation would transform the text."""


class Vocabulary:
    """The bytes of each token. Decodes like the framework's tokenizer."""

    def __init__(self, begins: Sequence[int], ends: Sequence[int], content: bytes, special: frozenset[int]) -> None:
        """Token ``i`` is ``content[begins[i]:ends[i]]``. ``special`` tokens are skipped on request."""
        self._begins = begins
        self._ends = ends
        self._content = content
        self._special = special
        self._known: dict[int, bytes] = {}

    def decode(self, tokens: Sequence[Any], *, skip_special_tokens: bool = True) -> Any:
        """Return the text of a list of tokens, or the texts of several lists."""
        if tokens and not isinstance(tokens[0], int):
            return [self._text(each, skip_special_tokens) for each in tokens]
        return self._text(tokens, skip_special_tokens)

    def _text(self, tokens: Sequence[int], skip_special: bool) -> str:
        known, special = self._known, self._special
        pieces = []
        for token in tokens:
            if skip_special and token in special:
                continue
            piece = known.get(token)
            if piece is None:
                piece = known[token] = self._piece(token)
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        if token >= len(self._begins):  # the model's output may be larger than the vocabulary
            return b""
        return self._content[self._begins[token] : self._ends[token]]


def read_vocabulary(directory: Path) -> Vocabulary | None:
    """Return the vocabulary of a model, or None if its texts are not simply the bytes of tokens."""
    network = ElementTree.parse(directory / _NETWORK).getroot()
    layers = {layer.attrib["id"]: layer for layer in network.iterfind("layers/layer")}
    kinds = [layer.attrib["type"] for layer in layers.values()]
    if not _PLAIN.issuperset(kinds) or kinds.count(_DECODER) != 1:
        return None
    decoder = next(id for id, layer in layers.items() if layer.attrib["type"] == _DECODER)
    sources = {
        edge.attrib["to-port"]: layers[edge.attrib["from-layer"]]
        for edge in network.iterfind("edges/edge")
        if edge.attrib["to-layer"] == decoder
    }
    constants = [sources.get(str(port)) for port in range(1, 5)]
    if not all(layer is not None and layer.attrib["type"] == "Const" for layer in constants):
        return None
    weights = (directory / _NETWORK).with_suffix(".bin").read_bytes()
    begins, ends, content, special = (_value(layer, weights) for layer in constants)
    return Vocabulary(begins.tolist(), ends.tolist(), content.tobytes(), frozenset(special.tolist()))


def _value(layer: Any, weights: bytes) -> np.ndarray[Any, Any]:
    data = layer.find("data").attrib
    kind = np.dtype({"i32": np.int32, "i64": np.int64, "u8": np.uint8}[data["element_type"]])
    return np.frombuffer(weights, kind, int(data["size"]) // kind.itemsize, int(data["offset"]))


# Numbers of tokens of images. The pipeline reports them when an answer is complete; they are cached by image size.

Size: TypeAlias = tuple[int, int]
"""Height and width."""

_MAX_COUNT: Final = 4096
"""Maximum number of cached sizes."""


class ImageTokens:
    """Cache of the number of tokens per image size, of one model. For the engine's thread only."""

    def __init__(self) -> None:
        self._known: dict[Size, int] = {}

    def of(self, sizes: Collection[Size]) -> int:
        """Estimate the tokens of images; an image of unknown size counts as many as the largest one so far."""
        largest = max(self._known.values(), default=IMAGE_TOKENS)
        return sum(self._known.get(size, largest) for size in sizes)

    def learn(self, sizes: Collection[Size], tokens: int) -> None:
        """Store the number of tokens of images, unless their sizes differ: then it cannot be attributed."""
        if len(set(sizes)) != 1:
            return
        if len(self._known) >= _MAX_COUNT:
            self._known.clear()
        (size,) = set(sizes)
        self._known[size] = -(-tokens // len(sizes))


class RunningSequence:
    """One sequence of a request."""

    def __init__(self, of: RunningRequest, index: int, number: int) -> None:
        """``number`` identifies the sequence in the pipeline."""
        sampling = of.request.sampling
        self.of = of
        self.number = number
        self.text = TextStream(
            sampling.stop, include_stop=sampling.include_stop_str_in_output, min_tokens=sampling.min_tokens
        )
        self.skip_special = sampling.skip_special_tokens
        self._stop = frozenset(sampling.stop_token_ids if sampling.ignore_eos else ())
        """Stop tokens that the pipeline does not know."""
        self._least = sampling.min_tokens
        self._count = 0
        self.tokens: Sequence[int] = ()
        """Tokens of this step."""
        self._most = min(sampling.max_tokens or of.order.room, of.order.room)
        self._had = self._came = 0
        """Number of tokens before this step, and in it."""
        self._index = index
        self._logprobs: Sequence[float] = ()
        self._reason: FinishReason | None = None
        self.cut = False
        """Whether it ended for a reason that the pipeline does not know."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], ended: FinishReason | None, counted: int) -> None:
        """Take the new output, with the fields of a ``Piece``."""
        if counted:
            self.of.counted(counted)
        self.tokens, self._logprobs = tokens, logprobs
        self._had, self._came = self._had + self._came, len(tokens)
        self._reason = ended
        if self._stop:
            self._check_stop()
        self.text.add(self.tokens)

    @property
    def over(self) -> bool:
        """Whether the sequence has finished."""
        return self._reason is not None

    def guesses(self, at_a_time: int) -> tuple[int, int]:
        """Return how many of ``at_a_time`` speculative tokens were proposed for this step, and how many were accepted.

        The first step has none. Accepted tokens come in addition to the one token that each step generates.
        """
        if not self._had or not self._came:
            return 0, 0
        return min(at_a_time, self._most - self._had - 1), self._came - 1

    def _check_stop(self) -> None:
        for place, token in enumerate(self.tokens, 1):
            self._count += 1
            if token in self._stop and self._count > self._least:
                self.tokens, self._logprobs = self.tokens[:place], self._logprobs[:place]
                self._end_with_stop()
                return

    def _end_with_stop(self) -> None:
        self.cut = self._reason is None
        self._reason = FinishReason.STOP

    def delta(self, tokenizer: Any, decoded: str) -> TokenDelta:
        """Return the new output, given the decoded window of ``text``."""

        def decode(tokens: Sequence[int]) -> str:
            text: str = tokenizer.decode(tokens, skip_special_tokens=self.skip_special)
            return text

        text = self.text.take(decoded, decode, last=self._reason is not None)
        if self.text.stopped and self._reason is not FinishReason.STOP:
            self._end_with_stop()
        if self._reason is not None:
            del self.of.open[self.number]
        logprobs = []
        if self.of.request.sampling.logprobs is not None:
            logprobs = [
                TokenLogprob(token, logprob, tokenizer.decode([token], skip_special_tokens=False))
                for token, logprob in zip(self.tokens, self._logprobs, strict=True)
            ]
        return TokenDelta(self._index, self.tokens, text, logprobs, self._reason)

    def abort(self) -> TokenDelta:
        """Return the final delta of an aborted sequence."""
        return TokenDelta(self._index, (), "", (), FinishReason.ABORT)


class RunningRequest:
    """A request that the engine has accepted."""

    def __init__(
        self,
        request: GenerationRequest,
        listener: RequestListener,
        length: int,
        order: GenerationOrder,
        known: ImageTokens,
    ) -> None:
        """``length`` is the number of tokens of the prompt's text; ``known`` estimates those of its images."""
        self.request = request
        self.id = request.id
        self.listener = listener
        self.order = order
        self._text_tokens = self.prompt_tokens = length
        self._known = known
        images = order.prompt[1] if isinstance(order.prompt, tuple) else ()
        self._sizes = [(image.shape[0], image.shape[1]) for image in images]
        self.begun = False
        """Whether the pipeline has started the request."""
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        """Those of the tokens of the prompt, once they are known."""
        self.open = {number: RunningSequence(self, index, number) for index, number in enumerate(order.numbers)}
        """Unfinished sequences by number."""

    def begin(self) -> None:
        """Notify the listener that the pipeline has started the request."""
        self.begun = True
        image_tokens = self._known.of(self._sizes)
        self.prompt_tokens += image_tokens
        self.listener.admitted(self.prompt_tokens, image_tokens=image_tokens)
        if self.prompt_logprobs:
            self.listener.advanced([TokenDelta(0, (), "", prompt_logprobs=self.prompt_logprobs)])

    def counted(self, tokens: int) -> None:
        """Record the number of tokens of the prompt with its images."""
        self._known.learn(self._sizes, tokens - self._text_tokens)

    def abort(self) -> None:
        """End the unfinished sequences with ``ABORT``."""
        deltas = [sequence.abort() for sequence in self.open.values()]
        self.open.clear()
        self.listener.advanced(deltas)

    def fail(self, error: NeriteError) -> None:
        """End the unfinished sequences with an error."""
        self.open.clear()
        self.listener.failed(error)


class StepTexts:
    """Converts the pieces of a step to deltas with text, and counts tokens. For the engine's thread only."""

    def __init__(self, tokenizer: Any, guesses: int) -> None:
        """``guesses`` is the number of speculative tokens per step."""
        self._tokenizer = tokenizer
        self._guesses = guesses
        self.generated_tokens = 0
        self.drafted = self.accepted = 0
        """Speculative tokens that were proposed, and those that were accepted."""

    def of(
        self, pieces: Iterable[Piece], wanted: dict[int, RunningSequence]
    ) -> tuple[dict[RunningRequest, list[TokenDelta]], list[int]]:
        """Return the deltas of the sequences in ``wanted``, and the numbers of those that the pipeline has to drop.

        ChoiceOutput sequences are removed from ``wanted``.
        """
        fresh = []
        for piece in pieces:
            sequence = wanted.get(piece[0])
            if sequence is not None:
                sequence.take(*piece[1:])
                fresh.append(sequence)
        deltas: dict[RunningRequest, list[TokenDelta]] = {}
        cut = []
        for sequence, text in zip(fresh, self._decoded(fresh), strict=True):
            self.generated_tokens += len(sequence.tokens)
            drafted, accepted = sequence.guesses(self._guesses)
            self.drafted += drafted
            self.accepted += accepted
            deltas.setdefault(sequence.of, []).append(sequence.delta(self._tokenizer, text))
            if sequence.over:
                del wanted[sequence.number]
            if sequence.cut:
                cut.append(sequence.number)
        return deltas, cut

    def _decoded(self, sequences: Sequence[RunningSequence]) -> list[str]:
        """Return the decoded window of each sequence. Decoding many at once costs little more than one."""
        decode = self._tokenizer.decode
        plain = [sequence.text.window for sequence in sequences if sequence.skip_special]
        texts = iter(decode(plain) if plain else ())
        return [
            next(texts) if sequence.skip_special else decode(sequence.text.window, skip_special_tokens=False)
            for sequence in sequences
        ]
