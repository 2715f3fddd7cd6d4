"""What a language model's files say about its texts: token ids of probe texts, rendered chats, sampling, stops, engine.

For the comparison of two versions of a model. Runs in a helper process, because it may load a tokenizer and run the
model's chat template.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from nerite.core.errors import NeriteError
from nerite.llm import selection
from nerite.llm.checkpoint import ARGUMENTS, CONFIG, checkpoint_content, checkpoint_files, describe_content
from nerite.llm.openai.chat_templates import ChatTemplate, find_template
from nerite.observability.gpus import driver_is_loaded

PROBES: Final[Mapping[str, str]] = {
    "English": "The quick brown fox jumps over 13 lazy dogs, doesn't it?",
    "German": "Größere Übungen: 3,5 % für Straßenbahnfahrer.",
    "French": "Où est l'été où naît le cœur, garçon ?",
    "Russian": "Съешь ещё этих мягких французских булок.",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "Arabic": "نص حكيم له سر قاطع وذو شأن عظيم.",
    "Hindi": "ऋषियों को सताने वाले दुष्ट राक्षसों का नाश।",
    "Thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "Chinese": "天地玄黄宇宙洪荒。",
    "Japanese": "いろはにほへと ちりぬるを。カタカナ",
    "Korean": "키스의 고유조건은 입술끼리 만나야 한다.",
    "emoji": "👩‍👩‍👧 🇪🇺 ✈️ 🫠",
    "Python": "def f(x: int) -> int:\n    return x ** 2  # é\n\n\tprint('\\n')",
    "JSON": '{"a": [1, 2.50, -3e-7, null], "b": {"c": "\\u00e9"}}',
    "spaces": "  two  three   \t tab\r\nline\n\n\nend ",
    "numbers": "0 12 345 6789 1234567890 3.14159 0x7f",
    "special tokens": "<s></s><pad><unk><|endoftext|><|im_start|>user<|im_end|>[INST]<think></think>",
    "nothing": "",
}
"""Texts in several scripts, and what tokenizers often disagree on."""

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Köln"}},
}
CHATS: Final[Mapping[str, Mapping[str, Any]]] = {
    "a question": {"messages": [{"role": "user", "content": "Hello <b>you</b>!"}], "tools": None},
    "a conversation": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "  What is 1+1? "},
        ],
        "tools": None,
    },
    "a chat with tools": {"messages": [{"role": "user", "content": "The weather in Köln?"}], "tools": [_TOOL]},
    "a tool's result": {
        "messages": [
            {"role": "user", "content": "The weather in Köln?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"sky": "grey"}'},
        ],
        "tools": [_TOOL],
    },
}
"""Variables of chat templates."""

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "special_tokens_map.json",
    "added_tokens.json",
)
_GENERATION: Final = "generation_config.json"
_STOPS: Final = ("eos_token_id", "stop_strings")
_SAMPLING: Final = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "max_new_tokens",
    "max_length",
)
_IDENTITY: Final = ("model_type", "architectures", "vocab_size", "max_position_embeddings", "torch_dtype")
_MODULES: Final = {selection.OPENVINO: "openvino-genai", selection.VLLM: "vllm", selection.TENSORRT: "tensorrt-llm"}


def inspect(directory: str, template: str, engine: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Describe the language model in a version directory.

    ``template`` is its parameter ``CHAT_TEMPLATE``; ``engine`` its parameter ``ENGINE``, or the backend that names an
    engine; ``kinds`` are the kinds of its instance groups.
    """
    version = Path(directory)
    checkpoint = _checkpoint(version)
    generation = describe_content(checkpoint, _GENERATION)
    config = describe_content(checkpoint, CONFIG)
    ids, why_not = _ids(checkpoint)
    return {
        "engine": _engine(version, engine, kinds),
        "probes": dict(PROBES),
        "ids": ids,
        "why_no_ids": why_not,
        "tokenizer_files": _hashes(checkpoint),
        "rendered": _rendered(version, template),
        "sampling": {name: generation[name] for name in _SAMPLING if name in generation},
        "stops": {name: generation.get(name, config.get(name)) for name in _STOPS},
        "config": {name: config[name] for name in _IDENTITY if name in config},
        "arguments": describe_content(version, ARGUMENTS),
    }


def _checkpoint(version: Path) -> Path:
    """Return where the model's files are: in the version directory, or where vLLM's arguments say."""
    place = describe_content(version, ARGUMENTS).get("model")
    return Path(place) if isinstance(place, str) and os.path.isdir(place) else version


def _ids(directory: Path) -> tuple[dict[str, list[int]], str]:
    """Return the token ids of each probe, or why there are none."""
    try:
        encode = _encoder(directory)
        return (
            ({}, "no tokenizer that can be read here")
            if encode is None
            else (
                {name: encode(text) for name, text in PROBES.items()},
                "",
            )
        )
    except Exception as error:  # of the tokenizer's library, which may raise anything
        return {}, f"the tokenizer cannot be loaded: {error}"


def _encoder(directory: Path) -> Callable[[str], list[int]] | None:
    if (directory / "openvino_tokenizer.xml").is_file() and selection.here(selection.OPENVINO):
        from nerite.llm.openvino_genai.framework import tokenizer

        loaded = tokenizer(directory)
        return lambda text: [int(each) for each in loaded.encode(text).input_ids.data.flatten()]
    if (directory / "tokenizer.json").is_file() and importlib.util.find_spec("tokenizers"):
        # Not a dependency of ours, but of most engines.
        fast = importlib.import_module("tokenizers").Tokenizer.from_file(str(directory / "tokenizer.json"))
        return lambda text: list(fast.encode(text).ids)
    return None


def _hashes(directory: Path) -> dict[str, str]:
    """Return the hashes of the tokenizer's files."""
    files = [each for each in checkpoint_files(directory) if each.name in _TOKENIZER_FILES]
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest()[:16] for each in files}


def _rendered(version: Path, parameter: str) -> dict[str, str]:
    """Return each chat as the model's template renders it, or the template's error."""
    try:
        found = find_template(version, parameter)
        moment = datetime(2024, 1, 1)
        plain = ChatTemplate(found.source, found.origin, found.words, lambda: moment)
        for_tools = ChatTemplate(found.with_tools, found.origin, found.words, lambda: moment)
    except NeriteError as error:
        return dict.fromkeys(CHATS, f"refused: {_placeless(error.message, version)}")
    rendered = {}
    for name, given in CHATS.items():
        try:
            rendered[name] = (for_tools if given["tools"] else plain).render(json.loads(json.dumps(given)))
        except NeriteError as error:
            rendered[name] = f"refused: {_placeless(error.message, version)}"
    return rendered


def _placeless(message: str, version: Path) -> str:
    """Return an error without the version's path, which always differs."""
    return message.replace(str(version), "…")


def _engine(version: Path, wanted: str, kinds: Sequence[str]) -> str:
    """Return name and version of the engine, as far as they are known in this Python."""
    installed = {engine for engine in selection.ENGINES if selection.here(engine)}
    gpu = driver_is_loaded() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and {*kinds} != {"KIND_CPU"}
    try:
        engine = selection.choose(checkpoint_content(version), wanted, installed, gpu=gpu).engine
    except NeriteError:
        return wanted
    try:
        return f"{engine} {importlib.metadata.version(_MODULES[engine])}"
    except importlib.metadata.PackageNotFoundError:
        return engine
