"""The page of ``nerite analyze`` in a real Chromium, with what was found of a real model.

The pictures in docs are made by this test: ``PICTURES=docs pytest tests/service/test_analyze_report.py``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from browser import Browser, browsing
from nerite.tools.analyze import finding
from nerite.tools.analyze.finding import HEADINGS, Finding, Goal, combined, row

FOUND = Path(__file__).with_name("analysis.jsonl")
"""The findings in a checkpoint: of the guided search for the network of benchmarks/analyze.py."""
DIFF = """\
--- models/network/config.pbtxt
+++ models/network/config.pbtxt
@@ -1,2 +1,19 @@
 backend: "onnxruntime"
-max_batch_size: 4
+max_batch_size: 16
+
+dynamic_batching {
+  max_queue_delay_microseconds: 2000
+}
+
+instance_group [
+  {
+    count: 1
+  }
+]
+
+parameters {
+  key: "intra_op_thread_count"
+  value {
+    string_value: "2"
+  }
+}"""
DRAWN = """[...document.querySelectorAll('.plot canvas')].filter((canvas) => canvas.getContext('2d')
    .getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value)).length"""
"""Number of plots that are not empty."""
VALUES = "document.querySelector('.plot .u-series:last-child .u-value').textContent"


def found() -> list[Finding]:
    turns: dict[str, list[Finding]] = {}
    for line in FOUND.read_text().splitlines():
        document = json.loads(line)
        turns.setdefault(document["config"], []).append(Finding.from_json(document))
    return list(map(combined, turns.values()))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    findings, goal = found(), Goal()
    about = (f"{len(findings)} of 72 configurations", "http, concurrency 4, 16", "2 cores")
    table = [HEADINGS, *(row(each, goal) for each in goal.winners(findings))]
    path = tmp_path / "page.html"
    path.write_text(finding.render(finding.AnalyzeHeading("network", about), findings, goal, table, DIFF))
    return path


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1240, 420])
def test_the_page_in_a_browser(page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    with browsing(tmp_path) as browser:
        browser.size(width, 980 if dark else 1260, dark=dark)
        browser.open(page.as_uri())
        browser.until(f"{DRAWN} === 2")
        assert browser.evaluate(VALUES) == ""
        browser.point("document.querySelector('.plot .u-over')")
        browser.until(f"/^[\\d,.]+ at [\\d,.]+$/.test({VALUES})")
        bars = browser.evaluate("[...document.querySelectorAll('.bars i')].map((bar) => bar.offsetWidth)")
        assert len(bars) == 10 and min(bars) > 0  # throughput and memory
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (sum(ground) < 200) == dark
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert "+max_batch_size: 16" in browser.text
        assert browser.evaluate("document.querySelectorAll('.wide tbody tr').length") == len(found())
        assert browser.complaints == []
        assert {url.partition(":")[0] for url in browser.requests} == {"file"}
        if width > 1000:
            take(browser, dark)


def take(browser: Browser, dark: bool) -> None:
    """Have the pictures of the documentation made, where somebody wants them."""
    folder = os.environ.get("PICTURES")
    if folder:
        browser.evaluate("scrollTo(0, 0)")
        if dark:
            browser.evaluate("document.querySelector('h2 + pre').previousElementSibling.scrollIntoView()")
        picture = Path(folder) / f"analyze-{'table' if dark else 'plots'}.png"
        browser.picture(picture)
        # Few colours are enough, and a third of the size.
        Image.open(picture).convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)
