"""OpenVINO GenAI itself: the import, and the pipelines that options ask for."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from nerite.backends.llm.openvino_genai import classes, json_strings
from nerite.backends.llm.openvino_genai.options import Options
from nerite.backends.llm.sampling import SamplingParameters
from nerite.backends.llm.structured import EBNF, JSON_SCHEMA, REGEX, Grammar
from nerite.backends.openvino.framework import openvino
from nerite.core.errors import NotHere

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


def pipeline(options: Options, tokenizer: Any) -> Any:
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


def common(options: Options) -> Any:
    """Return what each request of a model has to say."""
    config = genai().GenerationConfig()
    config.apply_chat_template = False  # prompts come as the model is to have them
    if options.speculates:
        config.num_assistant_tokens = options.guesses
    if options.lookup:
        config.max_ngram_size = options.lookup
    return config


def generation(
    options: Options, sampling: SamplingParameters, index: int, room: int, ends: Collection[int], form: Any = None
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
        return genai().StructuredOutputConfig(json_schema=json_strings.plain(grammar.source))
    classes.check(grammar.kind, grammar.source, quoted=grammar.kind == EBNF)
    return genai().StructuredOutputConfig(**{{REGEX: "regex", EBNF: "grammar"}[grammar.kind]: grammar.source})
