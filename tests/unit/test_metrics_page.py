"""docs/metrics.md has every metric that is declared, and none that is not, with its type, labels and setting."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nerite.cache.redis
import nerite.fronts.pool
import nerite.server_process
import nerite.transports.http.metrics_service  # noqa: F401  # with the imports above: every module that has metrics
from nerite.config.options import MetricsOptions
from nerite.core.byte_budget import BUDGETS
from nerite.observability.exposition import Metric, MetricTable

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
_OF_MODELS = {"model", "version", "model_name"}


def tables() -> list[MetricTable[Any]]:
    """Return the tables of all modules of the server. The router's are on its own page."""
    names = [
        name for name in sys.modules if name.partition(".")[0] == "nerite" and not name.startswith("nerite.router")
    ]
    modules = [sys.modules[name] for name in names]
    values = (value for module in modules for value in vars(module).values())
    return list({id(value): value for value in values if isinstance(value, MetricTable)}.values())


def declared() -> Iterator[tuple[MetricTable[Any], Metric[Any]]]:
    return ((table, metric) for table in tables() for metric in table.metrics)


def section(name: str) -> str:
    return PAGE[PAGE.index(f"<!-- {name} -->") : PAGE.index(f"<!-- /{name} -->")]


def test_the_page_has_every_metric_and_no_other() -> None:
    rows = re.findall(r"^\| `([a-z0-9_:]+)` \| (\w+) \|([^|]*)\|", section("metrics"), re.M)
    listed = {name: (kind, {*re.findall(r"`(\w+)`", labels)}) for name, kind, labels in rows}
    assert listed == {
        metric.name: (metric.kind, {*table.labels, *metric.label.split(",")} - _OF_MODELS - {""})
        for table, metric in declared()
    }
    assert len(rows) == len(listed) > 80


def test_each_metric_is_declared_once() -> None:
    names = Counter(metric.name for _, metric in declared())
    assert [name for name, count in names.items() if count > 1] == []


def test_settings_of_tables_are_on_the_page() -> None:
    settings = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, re.M)
    defaults = {name: default == "true" for name, default in settings if default in ("true", "false")}
    options = MetricsOptions()
    flags = {"cpu", "gpu"}
    for table in tables():
        if table.option and table.option not in flags:
            assert defaults[table.option] == getattr(options, table.option)


def test_the_page_has_every_internal_cache() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (\d+) \|", section("caches"), re.M))
    assert rows == {budget.name: str(budget.limit >> 20) for budget in BUDGETS}
