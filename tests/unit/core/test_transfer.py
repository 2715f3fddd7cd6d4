from __future__ import annotations

import pytest

from nerite.core.transfer import EVERY, DownloadProgress, readable_size, readable_time


def test_lines() -> None:
    progress = DownloadProgress("model 'm'", 2, 3_000_000, 100.0)
    assert progress.start() == "downloading model 'm': 2 files, 3.0 MB"
    progress.done = 1_000_000
    assert progress.line(100.0 + EVERY - 0.1) == ""
    assert progress.line(100.0 + EVERY) == "downloading model 'm': 1.0 MB of 3.0 MB, 100.0 kB a second, 0:20 left"
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


def test_the_rate_is_that_of_the_last_seconds_and_of_what_was_received() -> None:
    progress = DownloadProgress("model 'm'", 1, 100_000_000, 0.0, done=40_000_000)
    assert progress.start() == "downloading model 'm': 1 file, 100.0 MB, 40.0 MB of it here already"
    assert progress.remark(0.5) == ""
    for second in range(1, 21):
        progress.done += 1_000_000
        assert progress.remark(float(second)).startswith("1.0 MB a second")
    assert progress.remark(20.0) == "1.0 MB a second, 0:40 left"
    for second in range(21, 60):
        said = progress.remark(float(second))
    assert said == "0 bytes a second", "it stands still"
    progress.done = 100_000_000
    assert progress.end(60.0) == "downloaded model 'm': 60.0 MB in 60.0 s, 1.0 MB a second"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (750, "12:30"), (11_100, "3 h 05 min"), (-1, "0:00")]
)
def test_times(seconds: float, text: str) -> None:
    assert readable_time(seconds) == text
