"""The table of all flags: those that annotate the options, and those that set no single option.

Parsing, environment variables, the options file, help and docs/flags.md read this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from operator import add
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from nerite.config import flag as kinds
from nerite.config.flag import BOOLEAN, FLOAT, INTEGER, NERITE_GROUP, TEXT, Flag, ValueKind, nerite_flag
from nerite.config.options import ServerOptions

_DEPRECATED = "DEPRECATED"
# fmt: off

GROUPS: tuple[str, ...] = (
    "", "Server", "Logging", "Model Repository", "HTTP", "GRPC", "Sagemaker", "Vertex", "Metrics", "Tracing", "Backend",
    "Repository Agent", "Response Cache", "Rate Limiter", "Memory/Device Management", "Shared Memory", NERITE_GROUP,
    _DEPRECATED,
)
"""Headings in the order of the help, which is Triton's. The first, of ``--help`` itself, is empty."""

_KINDS: dict[type, ValueKind] = {bool: BOOLEAN, int: INTEGER, float: FLOAT, str: TEXT}


def _trace_flag(setting: str, kind: ValueKind, meaning: str, instead: str, **more: Any) -> Flag:
    """Return a flag that Triton had before ``--trace-config``."""
    return Flag(
        f"trace-{setting}",
        f"Use --trace-config {meaning}.",
        kind,
        group=_DEPRECATED,
        deprecated=f"Warning: '--trace-{setting}' has been deprecated and will be removed in future releases. Please "
        f"use '--trace-config {instead} instead.",
        **more,
    )


HELP = Flag("help", "Show this text and exit.", kinds.SWITCH)
OPTIONS_FILE = nerite_flag(
    "options-file", "TOML file with more options: each key is a flag without its dashes, a repeated flag is a list.",
    TEXT)
_FIRST = (
    HELP,
    Flag("model-store", "Another name of --model-repository.", kinds.PATHS, kinds.union, "Model Repository",
         stands_for="model-repository"),
    Flag("cache-config", "Setting of the response cache: local,size=<bytes>, or redis,host=<name> and "
         "redis,port=<number>. May be repeated, for one cache.", kinds.cache_config, add, "Response Cache"),
    OPTIONS_FILE,
    nerite_flag("address", "Address of every port whose own address flag is not given. 0.0.0.0 is all networks of this "
                "machine.", TEXT, default="127.0.0.1; as `tritonserver` 0.0.0.0"),
)
"""Flags that set no single option and are listed first in their groups."""
_LAST = (
    Flag("metrics-config", "counter_latencies, histogram_latencies, summary_latencies and stage_histograms (true or "
         "false), summary_quantiles (<quantile>:<error>,...). May be repeated.",
         kinds.metrics_config, kinds.last_wins, "Metrics",
         "counter_latencies=true, histogram_latencies=false, summary_latencies=false, "
         "stage_histograms=true, summary_quantiles=0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001"),
    Flag("trace-config", "For all modes: mode, level, rate, count. For triton: file, log-frequency. For opentelemetry: "
         "url, resource, bsp_max_queue_size, bsp_schedule_delay, bsp_max_export_batch_size. May be repeated.",
         kinds.trace_config, add, "Tracing", "mode=triton, level=OFF, rate=1000, count=-1"),
    Flag("strict-model-config", "Use --disable-auto-complete-config.", BOOLEAN, None, _DEPRECATED, "false",
         deprecated="Warning: '--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' "
         "instead."),
    Flag("response-cache-byte-size", "Use --cache-config local,size=<bytes>.", kinds.BYTES, None, _DEPRECATED, "0",
         deprecated="Warning: '--response-cache-byte-size' has been deprecated! This will default to the 'local' cache "
         "implementation with the provided byte size for its config. Please use '--cache-config' instead. The "
         "equivalent --cache-config CLI args would be: '--cache-config=local,size={value}'"),
    _trace_flag("file", TEXT, "triton,file=<path>", "triton,file=<filepath>"),
    _trace_flag("level", kinds.trace_level, "level=<level>", "level=<OFF|TIMESTAMPS|TENSORS>", join=add),
    _trace_flag("rate", INTEGER, "rate=<number>", "rate=<rate value>"),
    _trace_flag("count", INTEGER, "count=<number>", "count=<count value>"),
    _trace_flag("log-frequency", INTEGER, "triton,log-frequency=<number>",
                "triton,log-frequency=<log frequency value>"),
)
# fmt: on


def _flags_of(options: Any, path: str = "", group: str = "") -> Iterator[Flag]:
    """Yield the flags that annotate the fields of ``options``, complete with kind, group, default and path."""
    for field in fields(options):
        hint, value = cast(Any, field.type), getattr(options, field.name)
        plain, note = get_args(hint) if get_origin(hint) is Annotated else (hint, group)
        if is_dataclass(value):
            yield from _flags_of(value, f"{path}{field.name}.", note)
        elif isinstance(note, Flag):
            name = note.name.format(path.partition(".")[0])
            kind = _implied_kind(name, plain) if note.kind is kinds.OF_FIELD else note.kind
            default = note.default or (_text(value) if kind.label else "")
            place = path + field.name
            yield replace(note, name=name, kind=kind, group=note.group or group, default=default, field=place)


def _implied_kind(name: str, plain: Any) -> ValueKind:
    """Return the kind of value that the type of a field implies."""
    return kinds.choice(name, get_args(plain)) if get_origin(plain) is Literal else _KINDS[plain]


def _text(default: object) -> str:
    """Return a default as the help shows it; nothing for an empty one."""
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None or default in ((), {}) else str(default)


FLAGS: tuple[Flag, ...] = tuple(
    sorted((*_FIRST, *_flags_of(ServerOptions()), *_LAST), key=lambda flag: GROUPS.index(flag.group))
)
BY_NAME: dict[str, Flag] = {flag.name: flag for flag in FLAGS}


def at(options: object, path: str) -> Any:
    """Return the value at a dotted path of ``ServerOptions``."""
    return reduce(getattr, path.split("."), options)


def placed(options: Any, path: str, value: object) -> Any:
    """Return a copy of ``options`` with ``value`` at a dotted path."""
    head, _, rest = path.partition(".")
    return replace(options, **{head: placed(getattr(options, head), rest, value) if rest else value})


# Prints docs/flags.md: ``python -m nerite.cli.flags > docs/flags.md``.

_INTRODUCTION = """\
# Flags

<!-- Written by `python -m nerite.cli.flags > docs/flags.md`. Do not edit. -->

`nerite serve [flags] [repository ...]`, or `tritonserver [flags]` for scripts and manifests that were written for
Triton. Names, defaults and messages are Triton's; the group *Nerite* lists our additions. Without `--address`,
`nerite serve` accepts connections only from this machine, `tritonserver` from everywhere, as Triton does.

Write a flag as `--name=value` or `--name value`; any unambiguous prefix of its name works. Flags that are not on the
command line are read from the environment (`--http-port` is `NERITE_HTTP_PORT`; put several values of one flag on
separate lines), then from the TOML file named by `--options-file` or `NERITE_OPTIONS_FILE`, whose keys are the flag
names without the leading dashes:

```toml
http-port = 9000
log-verbose = 1
model-repository = ["/models", "/more-models"]
```

*No effect* marks flags that are parsed and validated so that existing command lines work, but do nothing in this
version; the server logs one warning that names those in use.
"""


def reference() -> str:
    """Return the page as Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(group) for group in GROUPS if group)])


def _section(group: str) -> str:
    rows = [_row(flag) for flag in FLAGS if flag.group == group]
    return "\n".join([f"## {group}", "", "| Flag | Value | Default | Meaning |", "|---|---|---|---|", *rows, ""])


def _row(flag: Flag) -> str:
    default = flag.default if " " in flag.default or not flag.default else f"`{flag.default}`"
    effect = f" *No effect: {flag.no_effect}.*" if flag.no_effect else ""
    value = f"`{flag.kind.label}`" if flag.kind.label else ""
    cells = (f"`--{flag.name}`", value, default, flag.help + effect)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")
