"""Prints docs/flags.md: ``python -m nerite.cli.reference > docs/flags.md``."""

from __future__ import annotations

from nerite.cli.flags import FLAGS, GROUPS
from nerite.config.flag import Flag

_INTRODUCTION = """\
# Flags

<!-- Written by `python -m nerite.cli.reference > docs/flags.md`. Do not edit. -->

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
