"""Prints docs/flags.md: ``python -m nerite.cli.reference > docs/flags.md``."""

from __future__ import annotations

from nerite.cli.flags import FLAGS, GROUPS, Flag

_INTRODUCTION = """\
# Flags

<!-- Written by `python -m nerite.cli.reference > docs/flags.md`. Do not edit. -->

`nerite serve [flags] [repository ...]`, or `tritonserver [flags]` for scripts and manifests that were written for
Triton. Names, defaults and messages are Triton's; the group *Nerite* has what we added. Without `--address` the first
is reached from this machine alone, the second from everywhere, as Triton is.

A flag is written `--name=value` or `--name value`, and may be shortened as long as it stays clear which one is meant.
What is not on the command line is looked for in the environment (`--http-port` is `NERITE_HTTP_PORT`; several values
of one flag stand on a line each), then in the TOML file named by `--options-file` or `NERITE_OPTIONS_FILE`, whose keys
are the flags without dashes:

```toml
http-port = 9000
log-verbose = 1
model-repository = ["/models", "/more-models"]
```

*No effect* marks flags that are read and checked so that existing command lines work, and do nothing in this version;
the server names them once in its log when they are used.
"""


def reference() -> str:
    """Return the page."""
    return "\n".join([_INTRODUCTION, *(_section(group) for group in GROUPS if group)])


def _section(group: str) -> str:
    rows = [_row(flag) for flag in FLAGS if flag.group == group]
    return "\n".join([f"## {group}", "", "| Flag | Value | Default | Meaning |", "|---|---|---|---|", *rows, ""])


def _row(flag: Flag) -> str:
    default = flag.default if flag.default_text or not flag.default else f"`{flag.default}`"
    effect = f" *No effect: {flag.accepted}.*" if flag.accepted else ""
    value = f"`{flag.kind.label}`" if flag.kind.label else ""
    cells = (f"`--{flag.name}`", value, default, flag.help + effect)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")
