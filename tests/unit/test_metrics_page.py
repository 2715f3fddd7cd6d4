"""docs/metrics.md has every metric there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

from nerite.core.byte_budget import BUDGETS

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r'"((?:nv|nerite)_[a-z0-9_]+[a-z0-9]|vllm:[a-z0-9_]+)"')


def named() -> set[str]:
    """Return the names in the sources: those of the admission are put together there."""
    sources = (path for path in (ROOT / "src" / "nerite").rglob("*.py") if "backends" not in path.parts)
    names = {name for path in sources for name in _NAME.findall(path.read_text())}
    quota = (ROOT / "src/nerite/admission/tenants.py").read_text()
    table = quota[quota.index("_COUNTERS: Final") : quota.index("def _counter")]
    admission = re.findall(r'(?:_counter|_gauge)?\(\s*"([a-z_]+)",', table)
    return names | {f"nerite_admission_{name}" for name in admission}


def rows() -> dict[str, str]:
    """Return the metrics of the page and their types."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = page[page.index("<!-- metrics -->") : page.index("<!-- /metrics -->")]
    return dict(re.findall(r"^\| `([a-z0-9_:]+)` \| (\w+) \|", table, re.M))


def test_the_page_has_every_internal_cache() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = page[page.index("<!-- caches -->") : page.index("<!-- /caches -->")]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (\d+) \|", table, re.M))
    assert rows == {budget.name: str(budget.limit >> 20) for budget in BUDGETS}


def test_the_page_has_every_metric_and_no_other() -> None:
    assert set(rows()) == named()
    assert len(named()) > 80
    assert set(rows().values()) == {"counter", "gauge", "histogram", "summary"}
