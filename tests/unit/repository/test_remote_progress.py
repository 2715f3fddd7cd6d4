from __future__ import annotations

import pytest

from nerite.repository.remote.store import EVERY, DownloadProgress, readable_size


def test_lines() -> None:
    progress = DownloadProgress("model 'm'", 2, 3_000_000, 100.0)
    assert progress.start() == "downloading model 'm': 2 files, 3.0 MB"
    progress.done = 1_000_000
    assert progress.line(100.0 + EVERY - 0.1) == ""
    assert progress.line(100.0 + EVERY) == "downloading model 'm': 1.0 MB of 3.0 MB, 100.0 kB a second"
    assert progress.line(101.0 + EVERY) == "", "not that soon again"
    assert progress.line(100.0 + 2 * EVERY) != ""
    progress.done = 3_000_000
    assert progress.end(130.0) == "downloaded model 'm': 3.0 MB in 30.0 s, 100.0 kB a second"


def test_what_is_done_at_once_has_no_rate() -> None:
    progress = DownloadProgress("model 'm'", 1, 5, 100.0)
    assert progress.start() == "downloading model 'm': 1 file, 5 bytes"
    progress.done = 5
    assert progress.end(100.04) == "downloaded model 'm': 5 bytes in 0.0 s"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (15_500_000_000, "15.5 GB"), (7 * 10**15, "7000.0 TB")],
)
def test_readable(size: int, text: str) -> None:
    assert readable_size(size) == text
