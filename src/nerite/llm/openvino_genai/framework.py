"""OpenVINO GenAI itself: the import, and the pipelines that options ask for."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from nerite.core.errors import InvalidArgument, NotHere
from nerite.core.tensor import Array
from nerite.frameworks.openvino.graph import openvino, translated
from nerite.llm.engine import LONGEST_TOKEN
from nerite.llm.openvino_genai import schema_rewrites
from nerite.llm.openvino_genai.options import EncoderOptions, PipelineOptions
from nerite.llm.request import SamplingParameters
from nerite.llm.structured_output import EBNF, JSON_SCHEMA, REGEX, Grammar

_VERBATIM: Final = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
"""For prompts that the framework tokenizes: to those to which it applies a template it adds no special tokens."""
SAMPLING: Final = frozenset(
    {
        *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
        *("logprobs", "truncate_prompt_tokens", "lora_name", "grammar", "priority"),
    }
)
"""Sampling parameters that the framework is told of, or that are seen to here."""


def genai() -> ModuleType:
    """Return the package's library. Raises ``Unsupported`` where it cannot be imported."""
    openvino()  # First, and without its telemetry.
    try:
        from openvino_genai import py_openvino_genai
    except ImportError as error:
        raise NotHere(f"unable to import openvino_genai ({error}): pip install 'nerite[llm]'") from error
    return py_openvino_genai  # type: ignore[no-any-return]  # The package has no types.


def tokenizer(directory: Path, *, pairs: bool = False) -> Any:
    """Load the tokenizer of a model; one for pairs of texts, where it can be. Raises what the framework raises."""
    # A second thread has next to nothing to do, and takes a core for a millisecond to wait for it.
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1}
    return genai().Tokenizer(str(directory), **properties, **({"add_second_input": True} if pairs else {}))


def pipeline(options: PipelineOptions, tokenizer: Any) -> Any:
    """Load a model. Raises what the framework raises."""
    library = genai()
    if options.sees:
        tokenizer.set_chat_template(_VERBATIM)
    scheduling = library.SchedulerConfig()
    scheduling.max_num_seqs = options.most_sequences
    scheduling.max_num_batched_tokens = options.batched_tokens
    scheduling.enable_prefix_caching = options.prefix_caching
    if options.cache_blocks:
        scheduling.num_kv_blocks = options.cache_blocks
    else:
        scheduling.cache_size = options.cache_gb
    properties: dict[str, Any] = dict(options.properties or {})
    more: dict[str, Any] = {}
    if options.adapter is not None:
        adapter = library.Adapter(str(options.adapter.file))
        # Also for weights of few bits, which could not be changed.
        static = library.AdapterConfig.Mode.MODE_STATIC
        more["adapters"] = library.AdapterConfig(adapter, options.adapter.scale, mode=static)
    if options.draft is not None:
        more["draft_model"] = library.draft_model(str(options.draft), options.device, **properties)
    if options.lookup:
        more["prompt_lookup"] = True
    return library.ContinuousBatchingPipeline(
        str(options.directory), tokenizer, scheduling, options.device, **properties, **more
    )


def layers(file: Path) -> list[str]:
    """Return the names of the layers of a model that an adapter can change. Raises what the framework raises."""
    model = openvino().Core().read_model(file)
    return [node.get_friendly_name() for node in model.get_ops() if node.get_type_name() == "MatMul"]


def common(options: PipelineOptions) -> Any:
    """Return what each request of a model has to say."""
    config = genai().GenerationConfig()
    config.apply_chat_template = False  # prompts come as the model is to have them
    if options.speculates:
        config.num_assistant_tokens = options.guesses
    if options.lookup:
        config.max_ngram_size = options.lookup
    return config


def generation(
    options: PipelineOptions,
    sampling: SamplingParameters,
    index: int,
    room: int,
    ends: Collection[int],
    form: Any = None,
) -> Any:
    """Return how one of the sequences of a request is generated: ``room`` tokens at most, until one of ``ends``.

    ``form`` is what ``structured`` made of a grammar.

    Stop strings are not in it: they are looked for in the text that is handed out. Nor are stop tokens where those
    of the model are ignored: the framework then ignores all of them. Raises what the framework raises.
    """
    config = common(options)
    config.max_new_tokens = min(sampling.max_tokens or room, room)
    config.min_new_tokens = min(sampling.min_tokens, config.max_new_tokens)
    config.ignore_eos = sampling.ignore_eos
    if not sampling.ignore_eos:
        config.stop_token_ids = {*sampling.stop_token_ids, *ends}
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    config.repetition_penalty = sampling.repetition_penalty
    if sampling.logprobs is not None:
        config.logprobs = 1
    if sampling.temperature > 0:
        config.do_sample = True
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k:
            config.top_k = sampling.top_k
        # Of itself the framework would have the same one for each request.
        config.rng_seed = random.getrandbits(63) if sampling.seed is None else (sampling.seed + index) % 2**63
    config.structured_output_config = form
    config.validate()
    return config


def structured(grammar: Grammar) -> Any:
    """Return a grammar as the framework takes it, which has not looked at it by then. Raises ``Unsupported``."""
    if grammar.kind == JSON_SCHEMA:
        return genai().StructuredOutputConfig(json_schema=schema_rewrites.plain_json_strings(grammar.source))
    schema_rewrites.check_classes(grammar.kind, grammar.source, quoted=grammar.kind == EBNF)
    return genai().StructuredOutputConfig(**{{REGEX: "regex", EBNF: "grammar"}[grammar.kind]: grammar.source})


# Models that read and do not write: OpenVINO GenAI's pipelines for embeddings and for reranking.
#
# Both cut texts that are too long in silence. So texts are counted before, and refused.

_MOST: Final = 32
"""Texts in one run of a reranker: each is padded to the longest."""
_UNTOLD: Final = 8192
"""Tokens that are tried where nobody says how many a model takes."""


class _Encoder(ABC):
    """What both have: a tokenizer to count with, and a limit."""

    def __init__(self, options: EncoderOptions, *, pairs: bool = False) -> None:
        """Raises ``NeriteError``."""
        try:
            self._tokenizer: Any = tokenizer(options.directory, pairs=pairs)
            self._most = _limit(self._tokenizer, options.context_length)
            self._pipeline: Any = self._made(options)
        except Exception as error:  # Whatever the framework raises says why the model cannot be loaded.
            raise translated(error, "loading model") from error

    @abstractmethod
    def _made(self, options: EncoderOptions) -> Any:
        """Return the framework's pipeline. Raises what the framework raises."""

    def _check(self, length: int, what: str) -> None:
        if not length:
            raise InvalidArgument(f"{what} is empty")
        if self._most and length > self._most:
            raise InvalidArgument(f"{what} has {length} tokens, and the model takes {self._most}: make it shorter")

    def _check_text(self, text: str, what: str) -> None:
        """Refuse a text that is too long whatever its tokens are: counting them takes its time."""
        if self._most and len(text) > self._most * LONGEST_TOKEN:
            raise InvalidArgument(
                f"{what} has {len(text)} characters, and the model takes {self._most} tokens: make it shorter"
            )

    def close(self) -> None:
        """Let go of the model."""
        self._pipeline = self._tokenizer = None


class OpenVinoEmbedder(_Encoder):
    """Texts to vectors."""

    def _made(self, options: EncoderOptions) -> Any:
        pipelines = genai().TextEmbeddingPipeline
        config = pipelines.Config()
        config.pooling_type = getattr(pipelines.PoolingType, options.pooling)
        config.normalize = options.normalize
        return pipelines(str(options.directory), options.device, config, **options.properties)

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens each text has. Raises ``InvalidArgument`` if one has more than the model takes."""
        for text in texts:
            self._check_text(text, "the text")
        lengths = _lengths(self._tokenizer.encode(list(texts)))
        for length in lengths:
            self._check(length, "the text")
        return lengths

    def vectors(self, texts: Sequence[str]) -> Array:
        """Return a row for each text."""
        return np.asarray(self._pipeline.embed_documents(list(texts)), np.float32)


class OpenVinoReranker(_Encoder):
    """How well texts answer a query."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__(options, pairs=True)
        self._pairs = self._tokenizer.supports_paired_input()

    def _made(self, options: EncoderOptions) -> Any:
        pipelines = genai().TextRerankPipeline
        config = pipelines.Config()
        config.top_n = _MOST
        return pipelines(str(options.directory), options.device, config, **options.properties)

    def tokens(self, query: str, documents: Sequence[str]) -> int:
        """Return how many tokens they have. Raises ``InvalidArgument`` if a text with the query has too many."""
        total = 0
        for text in (query, *documents):
            self._check_text(text, "a document, with the query,")
        for some in _chunks(documents):
            if self._pairs:
                encoded = self._tokenizer.encode([query], list(some))
            else:
                encoded = self._tokenizer.encode([query + each for each in some])
            for length in _lengths(encoded):
                self._check(length, "a document, with the query,")
                total += length
        return total

    def scores(self, query: str, documents: Sequence[str]) -> Array:
        """Return a number for each text, 0 to 1."""
        scores = np.zeros(len(documents), np.float32)
        at = 0
        for some in _chunks(documents):
            for index, score in self._pipeline.rerank(query, list(some)):
                scores[at + index] = score
            at += len(some)
        return scores


def _limit(tokenizer: Any, most: int) -> int:
    """Return how many tokens a text may have: ``most``, or fewer if the pipeline cuts there; 0 for any number."""
    text = "a " * ((most or _UNTOLD) + 1)
    (whole,), (cut,) = (_lengths(tokenizer.encode([text], truncation=truncation)) for truncation in (False, True))
    return min((limit for limit in (most, cut if cut < whole else 0) if limit), default=0)


def _chunks(documents: Sequence[str]) -> Iterator[Sequence[str]]:
    return (documents[at : at + _MOST] for at in range(0, len(documents), _MOST))


def _lengths(encoded: Any) -> list[int]:
    lengths: list[int] = encoded.attention_mask.data.sum(axis=1).tolist()
    return lengths
