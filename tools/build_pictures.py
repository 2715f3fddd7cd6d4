"""Makes the pictures of docs/bench.md: serves the examples, measures one, and opens the reports in Chromium.

Takes two minutes. The pictures of docs/analyze.md are made by ``PICTURES=docs pytest
tests/service/test_analyze_report.py``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import browsing  # noqa: E402  # the path has to be set first
from serving import NERITE, serving  # noqa: E402

PICTURES = {
    "bench-levels.png": (["--concurrency", "1:64:*2", "--window", "1"], 1700, False),
    "bench-within.png": (["--rate", "100,8000", "--within", "p99:20", "--window", "1"], 1500, True),
}
"""Arguments of the measurement, height in pixels, and whether the colour scheme is dark."""
_WIDTH = 1240
_COLOURS = 128
"""Few colours are enough, and a third of the size."""


def main() -> None:
    """Measure, and write the pictures."""
    subprocess.run([sys.executable, ROOT / "examples" / "build.py"], check=True)
    with tempfile.TemporaryDirectory() as name, serving(ROOT / "examples" / "models", Path(name, "log")) as server:
        folder = Path(name)
        for picture, (arguments, _, _) in PICTURES.items():
            report = ["--html", folder / f"{picture}.html", "--url", server.http]
            subprocess.run([NERITE, "bench", "scaler", *arguments, *report], check=True)
        with browsing(folder) as browser:
            for picture, (_, height, dark) in PICTURES.items():
                browser.size(_WIDTH, height, dark=dark)
                browser.open((folder / f"{picture}.html").as_uri())
                browser.until("document.querySelectorAll('.plot canvas').length > 0")
                browser.picture(ROOT / "docs" / picture)
                image = Image.open(ROOT / "docs" / picture).convert("RGB")
                image.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE).save(ROOT / "docs" / picture, optimize=True)


if __name__ == "__main__":
    main()
