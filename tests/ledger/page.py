"""docs/contract.md, made from the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ledger.config_fields import CONFIG_FIELDS
from ledger.endpoints import GRPC, HTTP
from ledger.flags import FLAGS
from ledger.metrics import METRICS
from ledger.pb_utils import PB_UTILS
from ledger.request_parameters import REQUEST_PARAMETERS
from nerite.cli import flags
from nerite.config import validate


class Section(NamedTuple):
    """A table of the page."""

    title: str
    works: Mapping[str, str]
    """What has an effect, and the test that shows it."""
    no_effect: Mapping[str, str]
    """What has none, for any model, and why."""
    partly: Mapping[str, frozenset[str]] = {}
    """The backends with which a field has an effect, where they are not all."""


_INTRODUCTION = """\
# The contract

Made by `tools/build_contract.py` from `tests/ledger/`. Do not edit.

Everything that Triton's configurations, flags, clients, models and dashboards rely on, and what it does here. What
**works** has a test that shows what it changes, named by its file in `tests/` and its function, or by a topic and an
exchange of `tests/conformance/exchanges/`, which asks a real Triton the same ([differences](differences.md)). What has
**no effect** is read and checked all the same, and the log says so when a model that sets it is loaded, or when the
server is started with it. A test holds the page complete.
"""


def sections() -> list[Section]:
    """Return the tables, in their order."""
    without = {name: why.reason for name, why in validate.FIELDS.items() if not why.heeded_by}
    partly = {name: why.heeded_by for name, why in validate.FIELDS.items() if why.heeded_by}
    idle = {flag.name: flag.no_effect for flag in flags.FLAGS if flag.no_effect}
    return [
        Section("Fields of `config.pbtxt`", CONFIG_FIELDS, without, partly),
        Section(
            "Flags", {f"--{name}": test for name, test in FLAGS.items()}, {f"--{name}": idle[name] for name in idle}
        ),
        Section("HTTP", HTTP, {}),
        Section("gRPC", GRPC, {}),
        Section("Parameters of requests", REQUEST_PARAMETERS, {}),
        Section("Python models", PB_UTILS, {}),
        Section("Metrics", METRICS, {}),
    ]


def page() -> str:
    """Return the text of the page."""
    return "\n".join([_INTRODUCTION, *(line for section in sections() for line in _table(section))])


def _table(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield "| | | shown by, or the reason |"
    yield "|---|---|---|"
    rows = {name: f"| `{name}` | {_with(section, name)} | `{test}` |" for name, test in section.works.items()}
    rows |= {name: f"| `{name}` | no effect | {reason} |" for name, reason in section.no_effect.items()}
    yield from (rows[name] for name in sorted(rows))
    yield ""


def _with(section: Section, name: str) -> str:
    backends = section.partly.get(name)
    return "works" if backends is None else f"works with {', '.join(sorted(backends))}"
