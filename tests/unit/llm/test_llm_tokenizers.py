"""Tokenizers converted without transformers: they find the tokens that the library ``tokenizers`` finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nerite.core.errors import Unsupported
from nerite.llm.conversion.tokenizer import TokenizerFile
from nerite.llm.openvino_genai import framework
from pages import ROOT

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEXTS = (
    "Hello, world! It's 12345 o'clock, and we'LL see.",
    "  two  spaces\n\n\tand\r\nlines   \n",
    "def f(x):\n    return x ** 2  # ½ of it\n",
    "Zürich 東京 مرحبا नमस्ते 🙂👩‍👩‍👧 e\u0301 \u00e9 ﬁ",
    "<s>[user]Hi <tool>{}</tool> there</s>",
    "before <mask> after<mask>x",
    "",
)
KINDS = ("gpt2", "llama3", "qwen", "smollm", "llama2", "mistral")


def fast(kind: str) -> Any:
    return with_bytes(kind) if kind in ("llama2", "mistral") else of_bytes(kind)


def with_bytes(kind: str) -> Any:
    """Return a tokenizer that writes rare characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if kind == "llama2":
        made.pre_tokenizer = pre_tokenizers.Metaspace()  # for the training alone
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *single], show_progress=False)
    made.train([str(ROOT / "README.md")], trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    if kind == "llama2":
        content["pre_tokenizer"] = None
    made = Tokenizer.from_str(json.dumps(content))
    if kind == "llama2":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def of_bytes(kind: str) -> Any:
    """Return a tokenizer whose tokens are sequences of bytes."""
    from tokenizers import (  # here, for it takes long
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    level = pre_tokenizers.ByteLevel
    parts = {
        "gpt2": [level(add_prefix_space=False)],
        "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), level(add_prefix_space=False, use_regex=False)],
        "qwen": [pre_tokenizers.Split(Regex(QWEN), "isolated"), level(add_prefix_space=False, use_regex=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), level(add_prefix_space=False)],
    }[kind]
    made = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    made.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    if kind == "qwen":
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=level.alphabet(), special_tokens=["<s>", "</s>"], show_progress=False
    )
    made.train([str(ROOT / "README.md")], trainer)
    made.add_tokens(["<tool>", AddedToken("</tool>", normalized=False)])
    made.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    if kind == "llama3":
        begin = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 0)])
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return made


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a tokenizer of each kind, in one of its own."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizers")
    for kind in KINDS:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast(kind), bos_token="<s>", eos_token="</s>")
        tokenizer.save_pretrained(folder / kind)
    program = (
        "import sys, pathlib\n"
        "from nerite.llm.conversion.tokenizer import write_tokenizer\n"
        "for each in map(pathlib.Path, sys.argv[1:]): write_tokenizer(each, each)\n"
        "assert not sys.modules['transformers'].__spec__, 'it is not the library'\n"
    )
    subprocess.run([sys.executable, "-c", program, *(folder / kind for kind in KINDS)], check=True)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_library(converted: Path, kind: str) -> None:
    right, found = fast(kind), framework.tokenizer(converted / kind)
    for text in TEXTS:
        for special in (False, True):
            tokens = right.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special).input_ids.data[0].tolist() == tokens, text
            assert found.decode(tokens, skip_special_tokens=special) == right.decode(tokens, special), text
    ends = right.token_to_id("<s>"), right.token_to_id("</s>")
    assert (found.get_bos_token_id(), found.get_eos_token_id()) == ends


Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda made, config: made.clear(), "it has no tokenizer.json"),
        (lambda made, config: made["model"].update(type="Unigram"), "its tokenizer is no BPE that can write any byte"),
        (lambda made, config: made["model"].update(byte_fallback=True), "its tokenizer is no BPE that can write any"),
        (lambda made, config: made.update(pre_tokenizer=None), "its tokenizer is no BPE that can write any byte"),
        (lambda made, config: made.update(normalizer={"type": "Lowercase"}), "has the normalizer Lowercase"),
        (lambda made, config: made.update(decoder={"type": "Metaspace"}), "has the decoder Metaspace"),
        (lambda made, config: config.update(tokenizer_class="OwnTokenizer"), "is of the class OwnTokenizer"),
        (
            lambda made, config: config.update(bos_token="<none>"),
            "the bos_token of tokenizer_config.json is",
        ),
        (
            lambda made, config: config.update(pad_token={"content": "<tool>"}),
            "the pad_token of tokenizer_config",
        ),
        (lambda made, config: config.update(extra_special_tokens=["<tool>"]), "the extra_special_tokens of"),
        (lambda made, config: config.update(add_bos_token=False), "differ in the token that texts begin with"),
        (lambda made, config: config.update(add_bos_token=True, bos_token="</s>"), "differ in the token that texts"),
        (lambda made, config: config.update(add_eos_token=True), "its tokenizer puts a token after texts"),
        (
            lambda made, config: config.update(added_tokens_decoder={"0": {"content": "<s>", "special": False}}),
            "the token 0 of tokenizer_config.json is not that of tokenizer.json",
        ),
        (
            lambda made, config: made["post_processor"]["processors"][1]["single"].reverse(),
            "its tokenizer puts several tokens around texts, or one after them",
        ),
    ],
)
def test_what_is_left_to_the_exporter(converted: Path, tmp_path: Path, change: Change, reason: str) -> None:
    made, config = (
        json.loads((converted / "llama3" / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")
    )
    TokenizerFile(converted / "llama3")
    change(made, config)
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported) as refused:
        TokenizerFile(tmp_path)
    assert reason in refused.value.message


def test_tokens_beyond_the_vocabulary(converted: Path, tmp_path: Path) -> None:
    made = json.loads((converted / "llama2" / "tokenizer.json").read_text())
    made["added_tokens"].append({**made["added_tokens"][0], "content": "<tool>", "id": 5000})
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(Unsupported, match="its tokenizer has an added token '<tool>' beyond its vocabulary"):
        TokenizerFile(tmp_path)
