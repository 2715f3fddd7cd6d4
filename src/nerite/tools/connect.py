"""``nerite connect``: prints the settings by which an agent uses a model of a server, or writes them once agreed to."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.cli.command import new_parser, show, status_of
from nerite.core.errors import InvalidArgument

_EPILOG: Final = """\
The server needs no settings for this, but agents of Anthropic ask for models named claude-…: serve with
--model-alias='claude-*=MODEL' if an agent insists on its own names (docs/agents.md).

Examples:
  nerite connect claude --model chat
  nerite connect codex --model chat --url http://gpu-3:8000 --key secret --write
"""
_DEFAULT_URL: Final = "http://localhost:8000"
_KEY_VARIABLE: Final = "NERITE_API_KEY"


class ConnectedModel(NamedTuple):
    """A model on a server."""

    url: str
    """Without a slash at its end."""
    name: str
    key: str


class AgentSettings(NamedTuple):
    """Settings of one agent."""

    text: str
    """What the user may paste."""
    note: str = ""
    """What has to be done with it, if that is not obvious."""
    file: str = ""
    """File in the home directory that it can be written to; empty if there is none."""
    merged: Callable[[str], str] | None = None
    """Returns the new content of the file, given its present one. Raises ``InvalidArgument``."""


def run(arguments: Sequence[str]) -> int:
    """Print or write settings; return the exit status."""
    return status_of("nerite connect", lambda: _connect(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite connect", "Print what an agent needs to use a model of this server.", _EPILOG)
    parser.add_argument("agent", metavar="AGENT", choices=[*_AGENTS], help=f"one of {', '.join(_AGENTS)}")
    parser.add_argument("--model", metavar="MODEL", required=True, help="the model, as /v1/models lists it")
    parser.add_argument("--url", metavar="URL", default=_DEFAULT_URL, help=f"the HTTP port (default: {_DEFAULT_URL})")
    parser.add_argument("--key", metavar="KEY", default="any", help="the API key, if the server checks one")
    parser.add_argument("--write", action="store_true", help="write the settings to the agent's file, after a question")
    parser.add_argument("--yes", action="store_true", help="answer that question with yes")
    return parser


def _connect(options: argparse.Namespace) -> int:
    url = options.url if "://" in options.url else f"http://{options.url}"
    url = url.rstrip("/").removesuffix("/v1")
    settings = _AGENTS[options.agent](ConnectedModel(url, options.model, options.key))
    show(settings.text.rstrip())
    if not options.write:
        if settings.note:
            print(settings.note, file=sys.stderr)
        return 0
    if settings.merged is None:
        raise InvalidArgument(f"there is no file to write for {options.agent}: {settings.note}")
    return _write(Path.home() / settings.file, settings.merged, agreed=options.yes)


def _write(file: Path, merged: Callable[[str], str], *, agreed: bool) -> int:
    """Write a file after the user has agreed; return the exit status."""
    try:
        before = file.read_text() if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from None
    after = merged(before)
    if after == before:
        show(f"{file} has these settings already.")
        return 0
    if not agreed:
        if not sys.stdin.isatty():
            raise InvalidArgument("the input is not a terminal, so this cannot be confirmed: add --yes")
        answer = input(f"Write this to {file}? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            show("Nothing was written.")
            return 1
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(after)
    fresh.chmod(0o600)  # it holds a key
    fresh.replace(file)
    show(f"Written to {file}.")
    return 0


def _exports(variables: Mapping[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def _claude(model: ConnectedModel) -> AgentSettings:
    variables = {
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_AUTH_TOKEN": model.key,
        "ANTHROPIC_MODEL": model.name,
        "ANTHROPIC_SMALL_FAST_MODEL": model.name,
    }

    def merged(before: str) -> str:
        try:
            settings: Any = json.loads(before or "{}")
        except ValueError as error:
            raise InvalidArgument(f"the settings of Claude Code are not JSON: {error}") from None
        if not isinstance(settings, dict) or not isinstance(settings.get("env", {}), dict):
            raise InvalidArgument("the settings of Claude Code are not an object with an object 'env'")
        settings["env"] = {**settings.get("env", {}), **variables}
        return json.dumps(settings, indent=2) + "\n"

    return AgentSettings(_exports(variables), "", ".claude/settings.json", merged)


def _codex(model: ConnectedModel) -> AgentSettings:
    text = f"""\
[model_providers.nerite]
name = "Nerite"
base_url = {json.dumps(model.url + "/v1")}
env_key = "{_KEY_VARIABLE}"
wire_api = "responses"

[profiles.nerite]
model = {json.dumps(model.name)}
model_provider = "nerite"
"""

    def merged(before: str) -> str:
        if text in before:
            return before
        if "[model_providers.nerite]" in before or "[profiles.nerite]" in before:
            raise InvalidArgument("the settings of Codex have other tables named nerite: remove them first")
        return f"{before.rstrip()}\n\n{text}".lstrip()

    start = f"{_KEY_VARIABLE}={shlex.quote(model.key)} codex --profile nerite"
    return AgentSettings(
        text, f"Put this into ~/.codex/config.toml, and start with: {start}", ".codex/config.toml", merged
    )


def _continue(model: ConnectedModel) -> AgentSettings:
    text = f"""\
name: Nerite
version: 0.0.1
schema: v1
models:
  - name: {json.dumps(model.name)}
    provider: openai
    model: {json.dumps(model.name)}
    apiBase: {json.dumps(model.url + "/v1")}
    apiKey: {json.dumps(model.key)}
    roles: [chat, edit, apply]
"""

    def merged(before: str) -> str:
        if before and before != text:
            raise InvalidArgument("~/.continue/config.yaml exists already: add the entry of 'models' to it by hand")
        return text

    return AgentSettings(text, "Put this into ~/.continue/config.yaml.", ".continue/config.yaml", merged)


def _cline(model: ConnectedModel) -> AgentSettings:
    text = f"""\
API Provider:  OpenAI Compatible
Base URL:      {model.url}/v1
API Key:       {model.key}
Model ID:      {model.name}
"""
    return AgentSettings(text, "enter this in the settings of Cline, which keeps them in the editor's own storage.")


def _open_webui(model: ConnectedModel) -> AgentSettings:
    variables = {
        "OPENAI_API_BASE_URL": f"{model.url}/v1",
        "OPENAI_API_KEY": model.key,
        "DEFAULT_MODELS": model.name,
        "ENABLE_OLLAMA_API": "false",
    }
    return AgentSettings(_exports(variables), "start Open WebUI with these variables: open-webui serve")


_AGENTS: Final[Mapping[str, Callable[[ConnectedModel], AgentSettings]]] = {
    "claude": _claude,
    "codex": _codex,
    "cline": _cline,
    "continue": _continue,
    "open-webui": _open_webui,
}
