"""Where a model's chat template is: in its parameter, in its version directory, or among those that we bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.config.near import nearest
from nerite.transports.openai.errors import ApiError

PARAMETER: Final = "CHAT_TEMPLATE"
_OURS: Final = Path(__file__).with_name("templates")
NAMES: Final = tuple(sorted(path.stem for path in _OURS.glob("*.jinja")))
"""The templates that we bring."""
PLAIN: Final = "plain"
_FILE: Final = "chat_template.jinja"
_TOKENIZER: Final = "tokenizer_config.json"
_ENGINE: Final = "model.json"
_FOR_TOOLS: Final = "tool_use"
"""The name of a template for chats with tools, where a tokenizer has several."""


class Found(NamedTuple):
    """A template, unread by anybody."""

    source: str
    with_tools: str
    """For chats with tools."""
    origin: str
    words: dict[str, str]
    """Such as ``bos_token``."""
    model_s_own: bool
    """False where nothing was found, and it is the plain one."""
    plain: bool = False
    """It knows of no special tokens."""


def find(version: Path | None, parameter: str) -> Found:
    """Return the template of a model. Raises ``ApiError`` for files that are not what they should be.

    ``version`` is the directory of its version, ``parameter`` a file's name in it, or one of ``NAMES``.
    """
    folder = _checkpoint(version)
    tokenizer = _tokenizer(folder)
    words = _words(tokenizer)
    if parameter:
        path = version / parameter if version is not None else None
        if path is not None and _inside(version, path) and path.is_file():
            source = _text(path)
            return Found(source, source, str(path), words, True)
        if parameter not in NAMES:
            meant = nearest(parameter, NAMES)
            hint = f" Did you mean '{meant}'?" if meant else ""
            raise _wrong(
                f"the parameter {PARAMETER} of its configuration is '{parameter}', which is neither a file in "
                f"{version} nor one of {', '.join(NAMES)}.{hint}"
            )
        source = _text(_OURS / f"{parameter}.jinja")
        return Found(source, source, f"built-in '{parameter}'", words, True, parameter == PLAIN)
    if folder is not None and (folder / _FILE).is_file():
        source = _text(folder / _FILE)
        return Found(source, source, str(folder / _FILE), words, True)
    given = tokenizer.get("chat_template")
    if given:
        named = _named(given)
        source = named.get("default") or next(iter(named.values()))
        return Found(source, named.get(_FOR_TOOLS, source), f"{folder}/{_TOKENIZER}", words, True)
    source = _text(_OURS / f"{PLAIN}.jinja")
    return Found(source, source, f"built-in '{PLAIN}'", words, False, True)


def _inside(folder: Path | None, path: Path) -> bool:
    return folder is not None and path.resolve().is_relative_to(folder.resolve())


def _checkpoint(version: Path | None) -> Path | None:
    """Return where a model's own files are: in the version directory, or where vLLM's ``model.json`` has them."""
    if version is None or not (version / _ENGINE).is_file():
        return version
    engine = _object(version / _ENGINE)
    for key in ("tokenizer", "model"):
        place = engine.get(key)
        if isinstance(place, str) and Path(place).is_dir():
            return Path(place)
    return version


def _tokenizer(folder: Path | None) -> dict[str, Any]:
    if folder is None or not (folder / _TOKENIZER).is_file():
        return {}
    return _object(folder / _TOKENIZER)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise _wrong(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _wrong(f"{path} is not an object")
    return found


def _words(tokenizer: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens: each is a string, or an object with one."""
    words = {}
    for name, value in tokenizer.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            words[name] = text
    return words


def _named(given: Any) -> dict[str, str]:
    """Return the templates of a tokenizer by name: it has one, or a list of them."""
    if isinstance(given, str):
        return {"default": given}
    try:
        return {str(each["name"]): str(each["template"]) for each in given}
    except (TypeError, KeyError):
        raise _wrong(f"'chat_template' in {_TOKENIZER} is neither a string nor a list of names and templates") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"{path} cannot be read: {error}") from None


def _wrong(what: str) -> ApiError:
    return ApiError(f"The model has no usable chat template: {what}", None, "bad_chat_template", 500)
