"""``nerite quota``: shows how much each tenant has used of each model, and its remaining quota."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nerite.cli.command import new_parser, show, show_json, show_table, status_of
from nerite.client import Client, ClientError
from nerite.tools.connection import add_connection, connected

_EPILOG = """\
The counters are described in docs/admission.md and start at zero when the server starts. For billing, --csv prints one
line per model, tenant and class. The figures of all tenants need the key of the category statistics, or a router's
admin-key; the key of a tenant shows that tenant's own.

Examples:
  nerite quota --header 'admin-key: KEY'
  nerite quota --header 'Authorization: Bearer KEY-OF-ACME'
  nerite quota acme --url gpu-3:8000
  nerite quota --csv > use.csv
"""
_STANDING: Final = ("Tenant", "Under way", "Retries left", "Limit", "A minute", "At once", "Left")
_USE: Final = ("Model", "Tenant", "Class", "Offered", "Admitted", "Refused", "Input", "Output", "Wasted")
_COUNTS: Final = ("offered", "admitted", "withdrawn", "retries", "joined")
_SIZES: Final = ("input_tokens", "output_tokens", "wasted_tokens", "input_bytes")
_ENDINGS: Final = {
    "complete": "complete",
    "cancelled": "cancelled",
    "deadline": "deadline",
    "failed": "failed",
    "refused": "refused_after_all",
}
"""Endings of admitted requests and their CSV columns; they add up to all admitted requests except running ones."""


def run(arguments: Sequence[str]) -> int:
    """Print usage and quotas; return the exit status."""
    return status_of("nerite quota", lambda: _report(_parser().parse_args(arguments)), ClientError)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite quota", "Show the usage and remaining quota of each tenant by model.", _EPILOG)
    parser.add_argument("tenant", metavar="TENANT", nargs="?", default="", help="show only this tenant")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print usage and quotas as JSON")
    form.add_argument("--csv", action="store_true", help="print usage as CSV")
    add_connection(parser)
    return parser


def _report(options: argparse.Namespace) -> int:
    with connected(options) as client:
        found = _of_tenant(client, options.tenant)
    if options.json:
        show_json(found)
    elif options.csv:
        show(_csv(found["use"]))
    elif found["tenants"] or found["use"]:
        _show_tables(found)
    else:
        show("The server has no tenants: it runs without --policy-file (docs/admission.md).")
    return 0


def _of_tenant(client: Client, tenant: str) -> dict[str, Any]:
    """Return usage and quotas of all tenants, or of the named one. Raises ``ClientError`` if that does not exist."""
    found = client.quota()
    if not tenant:
        return found
    named = {
        key: [each for each in found[key] if each["tenant"] == tenant] if key != "models" else found[key]
        for key in found
    }
    if not (named["tenants"] or named["use"]):
        known = ", ".join(each["tenant"] for each in found["tenants"])
        raise ClientError(f"the server has no tenant '{tenant}'. Its tenants: {known or 'none'}")
    return named


def _show_tables(found: Mapping[str, Any]) -> None:
    rates = [(each, rate) for each in found["tenants"] for rate in each["rates"] or [None]]
    if rates:
        show_table(_STANDING, [_standing(tenant, rate) for tenant, rate in rates])
    if found["use"]:
        show_table(_USE, [_use(each) for each in found["use"]])


def _standing(tenant: Mapping[str, Any], rate: Mapping[str, Any] | None) -> list[str]:
    under_way = f"{tenant['under_way']} of {tenant['concurrency']}" if tenant["concurrency"] else tenant["under_way"]
    figures = ["none", "", "", ""]
    if rate is not None:  # what does not refill has no rate
        figures = [rate["limit"], rate["per_minute"] or "", rate["burst"], rate["left"]]
    return [str(value) for value in (tenant["tenant"], under_way, tenant["retries_left"], *figures)]


def _use(use: Mapping[str, Any]) -> list[str]:
    refused = "\n".join(f"{count} {limit}" for limit, count in use["refused"].items()) or "0"
    if "input_bytes" in use:
        sizes = [f"{use['input_bytes']} bytes", "", ""]
    else:
        sizes = [f"{use['input_tokens']} tokens", f"{use['output_tokens']} tokens", f"{use['wasted_tokens']} tokens"]
    return [use["model"], use["tenant"], use["class"], str(use["offered"]), str(use["admitted"]), refused, *sizes]


def _csv(uses: Sequence[Mapping[str, Any]]) -> str:
    """Return usage as CSV, with a line for each model, tenant and class; columns that do not apply are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("model", "tenant", "class", *_COUNTS, "refused", *_ENDINGS.values(), *_SIZES))
    for use in uses:
        counts = [use[name] for name in _COUNTS]
        endings = [use["finished"].get(name, 0) for name in _ENDINGS]
        sizes = [use.get(name, "") for name in _SIZES]
        row = (use["model"], use["tenant"], use["class"], *counts, sum(use["refused"].values()), *endings, *sizes)
        writer.writerow(row)
    return text.getvalue().rstrip("\n")
