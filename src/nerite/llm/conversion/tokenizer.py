"""Converts a checkpoint's tokenizer.json to OpenVINO's files, by openvino_tokenizers, but without transformers.

The library takes a tokenizer of transformers, of which it reads tokenizer.json and few attributes. ``TokenizerFile``
has these. What transformers would change in the file when it loads it is left to OpenVINO's exporter.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from nerite.core.errors import Unsupported
from nerite.frameworks.openvino.graph import openvino
from nerite.llm import checkpoint

_FILE: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
_MAP: Final = "special_tokens_map.json"
_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_MORE: Final = ("additional_special_tokens", "extra_special_tokens")
_UNBOUNDED: Final = 1 << 60
_CLASSES: Final = frozenset(
    {
        *("PreTrainedTokenizerFast", "TokenizersBackend"),
        *(f"{name}{fast}" for name in ("GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer") for fast in ("", "Fast")),
    }
)
"""Classes of transformers that take tokenizer.json as it is, but for what ``TokenizerFile`` checks."""


_PARTS: Final = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""Parts of a tokenizer, with what their sequences are called."""
_LEVEL: Final = {
    "normalizer": {"NFC"},
    "pre_tokenizer": {"ByteLevel", "Digits", "Split"},
    "post_processor": {"ByteLevel", "TemplateProcessing"},
    "decoder": {"ByteLevel"},
}
"""Kinds of parts of a tokenizer whose tokens are sequences of bytes, as those of GPT-2, Llama 3 and Qwen."""
_FALLBACK: Final = {
    "normalizer": {"Prepend", "Replace"},
    "pre_tokenizer": {"Metaspace"},
    "post_processor": {"TemplateProcessing"},
    "decoder": {"ByteFallback", "Fuse", "Replace", "Strip"},
}
"""Kinds of parts of a tokenizer that has tokens for single bytes beside those for texts, as Llama 2 and Mistral."""


class AddedToken(NamedTuple):
    """A token that is found in texts before they are divided, by the names that the library reads."""

    content: str
    special: bool
    lstrip: bool
    rstrip: bool


class TokenizerFile:
    """The tokenizer of a checkpoint, with the attributes of one of transformers that the library reads."""

    is_fast: Final = True
    padding_side: Final = "left"
    truncation_side: Final = "right"
    model_input_names: Final = ("input_ids", "attention_mask")
    clean_up_tokenization_spaces: Final = False
    """It would corrupt texts of byte-pair encodings."""

    def __init__(self, directory: Path) -> None:
        """Raise ``Unsupported`` if the tokenizer is of a kind that is not known here."""
        self._file = directory / _FILE
        self._content = checkpoint.describe_content(directory, _FILE)
        self._config = checkpoint.describe_content(directory, _MAP) | checkpoint.describe_content(directory, _CONFIG)
        if not self._content:
            raise Unsupported(f"it has no {_FILE}")
        kind = str(self._config.get("tokenizer_class", "PreTrainedTokenizerFast"))
        if kind not in _CLASSES:
            raise Unsupported(f"its tokenizer is of the class {kind}, which is not known")
        self._check_parts()
        self._check_tokens(llama=kind.startswith("LlamaTokenizer"))

    def save_pretrained(self, directory: str) -> None:
        """Provide tokenizer.json in a directory."""
        Path(directory, _FILE).symlink_to(self._file.absolute())

    @property
    def model_max_length(self) -> int:
        """The number of tokens at which texts are cut, if a caller wishes it."""
        return int(self._config.get("model_max_length") or _UNBOUNDED)

    def get_vocab(self) -> Mapping[str, int]:
        """Return the numbers of all tokens."""
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        added = {token.content: number for number, token in self.added_tokens_decoder.items()}
        return {**self._content["model"]["vocab"], **added}

    @cached_property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Tokens beside those of the model, by their numbers."""
        return {
            each["id"]: AddedToken(each["content"], each["special"], each["lstrip"], each["rstrip"])
            for each in sorted(self._content.get("added_tokens") or (), key=lambda each: int(each["id"]))
        }

    def _check_parts(self) -> None:
        model = self._content.get("model") or {}
        level = "ByteLevel" in set(_kinds(self._content.get("pre_tokenizer"), "pretokenizers"))
        if model.get("type") != "BPE" or model.get("dropout") or level == bool(model.get("byte_fallback")):
            raise Unsupported("its tokenizer is no BPE that can write any byte")
        known = _LEVEL if level else _FALLBACK
        for part, inner in _PARTS.items():
            for kind in _kinds(self._content.get(part), inner):
                if kind not in known[part]:
                    raise Unsupported(f"its tokenizer has the {part} {kind}, which is not known")
        for token in () if level else self._content.get("added_tokens") or ():
            # OpenVINO would find some of these elsewhere, and would not write the others.
            if token.get("normalized") or model["vocab"].get(token["content"]) != token["id"]:
                raise Unsupported(f"its tokenizer has an added token '{token['content']}' beyond its vocabulary")

    def _check_tokens(self, *, llama: bool) -> None:
        """Raise ``Unsupported`` if transformers would add tokens, or have texts begin and end with others."""
        for number, described in (self._config.get("added_tokens_decoder") or {}).items():
            known = self.added_tokens_decoder.get(int(number))
            if known is None or any(described.get(name) != value for name, value in known._asdict().items()):
                raise Unsupported(f"the token {number} of {_CONFIG} is not that of {_FILE}")
        special = {token.content for token in self.added_tokens_decoder.values() if token.special}
        for name in _NAMES:
            if self._named(name) not in (None, *special):
                raise Unsupported(f"the {name} of {_CONFIG} is no special token of {_FILE}")
        for name in _MORE:
            if any(_content(token) not in special for token in self._config.get(name) or ()):
                raise Unsupported(f"the {name} of {_CONFIG} are no special tokens of {_FILE}")
        first, begins = self._first(), self._config.get("add_bos_token", llama or None)
        if begins is not None and first != (self._named("bos_token") if begins else None):
            raise Unsupported(f"{_CONFIG} and {_FILE} differ in the token that texts begin with")
        if self._config.get("add_eos_token"):
            raise Unsupported("its tokenizer puts a token after texts")

    def _named(self, name: str) -> str | None:
        return _content(self._config.get(name))

    def _first(self) -> str | None:
        """Return the token that texts begin with."""
        processor = self._content.get("post_processor") or {}
        for each in processor.get("processors", (processor,)):
            if each.get("type") == "TemplateProcessing":
                parts: list[str | None] = [part.get("SpecialToken", {}).get("id") for part in each["single"]]
                if len(parts) > 2 or parts[-1] is not None:
                    raise Unsupported("its tokenizer puts several tokens around texts, or one after them")
                return parts[0]  # None, which stands for the text, if nothing is before it
        return None

    def __getattr__(self, name: str) -> Any:
        """Return a special token, or its number, by the name of transformers."""
        base = name.removesuffix("_id")
        if base not in _NAMES:
            raise AttributeError(name)
        token = self._named(base)
        return token if name == base or token is None else self._vocabulary[token]


def _content(token: Any) -> str | None:
    """Return the text of a token, which may be described by an object."""
    return token.get("content") if isinstance(token, dict) else token


def _kinds(part: Mapping[str, Any] | None, inner: str) -> Iterator[str]:
    """Yield the types of a part of a tokenizer, or those that it is a sequence of."""
    for each in part.get(inner, (part,)) if part else ():
        yield str(each.get("type"))


def write_tokenizer(directory: Path, target: Path) -> None:
    """Convert the tokenizer of a checkpoint. Raises ``Unsupported``, and what the library raises.

    Must be called in a process of its own, which cannot use transformers afterwards.
    """
    tokenizer = TokenizerFile(directory)
    _stand_in()
    library = importlib.import_module("openvino_tokenizers")
    there, back = library.convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino().save_model(there, target / "openvino_tokenizer.xml")
    openvino().save_model(back, target / "openvino_detokenizer.xml")


def _stand_in() -> None:
    """Give the library what it imports from transformers: the class of tokenizers."""
    modules: dict[str, dict[str, Any]] = {
        "transformers": {"PreTrainedTokenizerBase": TokenizerFile, "PreTrainedTokenizerFast": TokenizerFile},
        "transformers.convert_slow_tokenizer": {"import_protobuf": None},
        "transformers.utils": {},
        "transformers.utils.versions": {"require_version": lambda requirement: None},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
