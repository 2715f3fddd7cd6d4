"""Everything that touches OpenVINO GenAI's API: import, pipelines for text, embeddings and reranking, and sampling."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from nerite.core.errors import InvalidArgument, NotInstalled, Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.openvino.graph import openvino, translated
from nerite.llm.engine import longest_text
from nerite.llm.json_grammar import bounded_grammar
from nerite.llm.openvino_genai import schema_rewrites
from nerite.llm.openvino_genai.options import MODEL, EncoderOptions, PipelineOptions
from nerite.llm.sampling_parameters import SamplingParameters
from nerite.llm.structured_output import EBNF, JSON_SCHEMA, REGEX, Grammar

_VERBATIM: Final = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
"""Template that leaves prompts unchanged, because the framework adds no special tokens when it applies a template."""
SAMPLING: Final = frozenset(
    {
        *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
        *("logprobs", "prompt_logprobs", "truncate_prompt_tokens", "lora_name", "grammar", "priority"),
    }
)
"""Sampling parameters that are supported by the framework or implemented here."""


_GROUP: Final = 64 * 1024
"""Characters that are tokenized at once if a request has several texts."""


def genai() -> ModuleType:
    """Import and return the library. Raises ``Unsupported`` if it cannot be imported."""
    openvino()  # must be imported first, which also disables its telemetry
    try:
        from openvino_genai import py_openvino_genai
    except ImportError as error:
        raise NotInstalled(f"unable to import openvino_genai ({error}): pip install 'nerite[llm]'") from error
    return py_openvino_genai  # type: ignore[no-any-return]  # the package has no types


def tokenizer(directory: Path, *, pairs: bool = False) -> Any:
    """Load the tokenizer of a model, with support for text pairs if requested. Raises what the framework raises."""
    # A second thread would have almost no work, but would spin on a core for a millisecond.
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1}
    return genai().Tokenizer(str(directory), **properties, **({"add_second_input": True} if pairs else {}))


def pipeline(options: PipelineOptions, tokenizer: Any) -> Any:
    """Load a model. Raises what the framework raises."""
    library = genai()
    if options.sees:
        tokenizer.set_chat_template(_VERBATIM)
    scheduling = library.SchedulerConfig()
    scheduling.max_num_seqs = options.max_sequences
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
        # The static mode also works for quantized weights, which cannot be changed later.
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
    """Return the names of a model's layers that an adapter can modify. Raises what the framework raises."""
    model = openvino().Core().read_model(file)
    return [node.get_friendly_name() for node in model.get_ops() if node.get_type_name() == "MatMul"]


def vocabulary_size(options: PipelineOptions) -> int:
    """Return the number of tokens that a model knows. Raises what the framework raises."""
    logits = openvino().Core().read_model(options.model).output("logits")
    return int(logits.get_partial_shape()[2].get_length())


def common(options: PipelineOptions) -> Any:
    """Return the generation settings that all requests to a model share."""
    config = genai().GenerationConfig()
    config.apply_chat_template = False  # prompts are already in the model's format
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
    """Return the generation settings of one sequence: at most ``room`` tokens, until one of ``ends``.

    ``form`` is the result of ``structured`` for the request's grammar.

    Stop strings are not included because they are searched for in the generated text. Stop tokens are not included if
    the model's own are ignored, because the framework then ignores all of them. Raises what the framework raises.
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
        # The framework's default seed is the same for all requests.
        config.rng_seed = random.getrandbits(63) if sampling.seed is None else (sampling.seed + index) % 2**63
    config.structured_output_config = form
    config.validate()
    return config


def structured(grammar: Grammar) -> Any:
    """Convert a grammar to the framework's format, which does not validate it yet. Raises ``Unsupported``."""
    if grammar.kind == JSON_SCHEMA:
        bounded = bounded_grammar(grammar.source)
        if bounded is not None:
            return genai().StructuredOutputConfig(grammar=bounded)
        return genai().StructuredOutputConfig(json_schema=schema_rewrites.plain_json_strings(grammar.source))
    schema_rewrites.check_classes(grammar.kind, grammar.tokens())
    return genai().StructuredOutputConfig(**{{REGEX: "regex", EBNF: "grammar"}[grammar.kind]: grammar.source})


# Embedding and reranking. The framework's pipelines silently truncate texts that are too long, so texts are tokenized
# first and rejected if they exceed the limit.

_MAX_COUNT: Final = 32
"""Maximum number of documents per run of a reranker, because each is padded to the longest."""
_PROBE_TOKENS: Final = 8192
"""Tokens with which truncation is tested if a model's maximum length is unknown."""


class _Encoder(ABC):
    """Common part of embedder and reranker: a tokenizer to count tokens, and the maximum length."""

    def __init__(self, options: EncoderOptions, *, pairs: bool = False) -> None:
        """Raises ``NeriteError``."""
        try:
            self._tokenizer: Any = tokenizer(options.directory, pairs=pairs)
            self._most = _limit(self._tokenizer, options.context_length)
            self._pipeline: Any = self._create(options)
        except Exception as error:  # any error of the framework explains why the model cannot be loaded
            raise translated(error, "loading model") from error

    @abstractmethod
    def _create(self, options: EncoderOptions) -> Any:
        """Return the framework's pipeline. Raises what the framework raises."""

    def _check(self, length: int, what: str) -> None:
        if not length:
            raise InvalidArgument(f"{what} is empty")
        if self._most and length > self._most:
            raise InvalidArgument(f"{what} has {length} tokens, but the model takes {self._most}: make it shorter")

    def _check_text(self, text: str, what: str) -> None:
        """Reject a text that is too long whatever its tokens are, without tokenizing it, which would take long."""
        if self._most and len(text) > longest_text(self._most):
            raise InvalidArgument(
                f"{what} has {len(text)} characters, but the model takes {self._most} tokens: make it shorter"
            )

    def _count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text. Raises ``InvalidArgument`` if one is too long."""
        for text in texts:
            self._check_text(text, "the text")
        lengths: list[int] = []
        for group in _groups(texts):
            lengths += _lengths(self._tokenizer.encode(group))
        for length in lengths:
            self._check(length, "the text")
        return lengths

    def close(self) -> None:
        """Release the model."""
        self._pipeline = self._tokenizer = None


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in groups of few characters: while one is tokenized, other threads wait for much of the time."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _GROUP:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


class OpenVinoEmbedder(_Encoder):
    """Embedder with OpenVINO GenAI's pipeline."""

    _known = 0
    """Number of tokens of the vocabulary; 0 until it was read."""

    def _create(self, options: EncoderOptions) -> Any:
        pipelines = genai().TextEmbeddingPipeline
        config = pipelines.Config()
        config.pooling_type = getattr(pipelines.PoolingType, options.pooling)
        config.normalize = options.normalize
        return pipelines(str(options.directory), options.device, config, **options.properties)

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text. Raises ``InvalidArgument`` if a text is too long for the model."""
        return self._count(texts)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Raises ``NeriteError`` for unknown ones, and if the model has no detokenizer."""
        if not self._known:
            try:
                self._known = max(self._tokenizer.get_vocab().values(), default=-1) + 1
            except RuntimeError:
                raise Unsupported("'prompt_token_ids': the model has no detokenizer, so it takes text only") from None
        if wrong := [token for token in tokens if token >= self._known]:
            raise InvalidArgument(
                f"'prompt_token_ids' has {wrong[0]}, but the vocabulary has {self._known} tokens, from 0"
            )
        try:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""
        except RuntimeError as error:
            raise translated(error, "reading 'prompt_token_ids'") from error

    def vectors(self, texts: Sequence[str]) -> Array:
        """Return one row per text."""
        return np.asarray(self._pipeline.embed_documents(list(texts)), np.float32)


class OpenVinoReranker(_Encoder):
    """Reranker with OpenVINO GenAI's pipeline."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__(options, pairs=True)
        self._pairs = self._tokenizer.supports_paired_input()

    def _create(self, options: EncoderOptions) -> Any:
        pipelines = genai().TextRerankPipeline
        config = pipelines.Config()
        config.top_n = _MAX_COUNT
        return pipelines(str(options.directory), options.device, config, **options.properties)

    def tokens(self, query: str, documents: Sequence[str]) -> int:
        """Return the total number of tokens. Raises ``InvalidArgument`` if a document with the query is too long."""
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
        """Return a score from 0 to 1 for each document."""
        scores = np.zeros(len(documents), np.float32)
        at = 0
        for some in _chunks(documents):
            for index, score in self._pipeline.rerank(query, list(some)):
                scores[at + index] = score
            at += len(some)
        return scores


class OpenVinoClassifier(_Encoder):
    """Classifier with a tokenizer and a network, for which the framework has no pipeline."""

    def _create(self, options: EncoderOptions) -> Any:
        self.labels = options.labels
        self._independent = options.independent
        library = openvino()
        return library.Core().compile_model(str(options.directory / MODEL), options.device, dict(options.properties))

    def tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text. Raises ``InvalidArgument`` if a text is too long for the model."""
        return self._count(texts)

    def probabilities(self, texts: Sequence[str]) -> Array:
        """Return one row per text, with a number for each class."""
        encoded = self._tokenizer.encode(list(texts))
        given = {"input_ids": encoded.input_ids.data, "attention_mask": encoded.attention_mask.data}
        named = {name for port in self._pipeline.inputs for name in port.names}
        inputs = {name: values for name, values in given.items() if name in named}
        if "token_type_ids" in named:
            inputs["token_type_ids"] = np.zeros_like(given["input_ids"])
        logits = np.asarray(self._pipeline(inputs)["logits"], np.float32)
        if self._independent:
            one: Array = 1 / (1 + np.exp(-logits))
            return one
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        several: Array = powers / powers.sum(axis=1, keepdims=True)
        return several


def _limit(tokenizer: Any, most: int) -> int:
    """Return the maximum length of a text: ``most``, or less if the tokenizer truncates earlier; 0 for no limit."""
    text = "a " * ((most or _PROBE_TOKENS) + 1)
    (whole,), (cut,) = (_lengths(tokenizer.encode([text], truncation=truncation)) for truncation in (False, True))
    return min((limit for limit in (most, cut if cut < whole else 0) if limit), default=0)


def _chunks(documents: Sequence[str]) -> Iterator[Sequence[str]]:
    return (documents[at : at + _MAX_COUNT] for at in range(0, len(documents), _MAX_COUNT))


def _lengths(encoded: Any) -> list[int]:
    lengths: list[int] = encoded.attention_mask.data.sum(axis=1).tolist()
    return lengths
