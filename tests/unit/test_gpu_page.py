"""What docs/gpus.md says was verified: the figures in committed files of the exam, and no others."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import gpu_page  # noqa: E402
from gpu_parts import PARTS  # noqa: E402
from gpu_parts.result import Figure, Gap, PartResult  # noqa: E402

RESULT = PartResult(
    part="answers",
    kind="KIND_GPU",
    command="python3 benchmarks/gpu_exam.py --out results",
    date="2026-11-28 12:00+00:00",
    revision="0123456789ab, sources 0123456789ab",
    limit=85,
    cards=["Card X1"],
    outcome="ok",
    figures=[Figure("difference", 0.001, "", "<= 0.01"), Figure("rows", 1234.5, "rows/s")],
    skipped=[Gap("ONNX Runtime", "onnxruntime is a CPU build")],
)


def saved(folder: Path, result: PartResult = RESULT) -> Path:
    folder.mkdir(exist_ok=True)
    result.save(folder / f"{result.part}.json")
    return folder


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_the_page_has_the_figures_of_the_committed_files_and_no_others() -> None:
    page = (ROOT / "docs" / "gpus.md").read_text()
    between = page.partition(f"<!-- {gpu_page.SECTION} -->\n")[2].partition(f"<!-- /{gpu_page.SECTION} -->")[0]
    assert between == gpu_page.table(gpu_page.results())


def test_what_has_no_result_is_not_verified() -> None:
    assert rows(gpu_page.table([])) == [[part.title, "", "not verified", "", "", ""] for part in PARTS.values()]


def test_figures_and_gaps_have_card_and_date() -> None:
    title, where = PARTS["answers"].title, ["Card X1", "2026-11-28"]
    missed = dataclasses.replace(RESULT, figures=[Figure("difference", 0.1, "", "<= 0.01")], outcome="cut", why="late")
    table = rows(gpu_page.table([RESULT, missed]))
    assert [title, "difference", "0.001", "<= 0.01", *where] in table
    assert [title, "rows", "1,234 rows/s", "", *where] in table
    assert [title, "ONNX Runtime", "not verified: onnxruntime is a CPU build", "", *where] in table
    assert [title, "difference", "0.1", "<= 0.01: **not met**", *where] in table
    assert [title, "the rest", "not verified: late", "", *where] in table
    assert [title, "", "not verified", "", "", ""] not in table


def test_a_rehearsal_is_refused(tmp_path: Path) -> None:
    for result in (dataclasses.replace(RESULT, kind="KIND_CPU"), dataclasses.replace(RESULT, cards=[])):
        with pytest.raises(ValueError, match="is no result of a GPU"):
            gpu_page.take_over(saved(tmp_path / "run", result), tmp_path / "results")
        assert list((tmp_path / "results").iterdir()) == []


def test_of_a_part_and_a_card_the_last_result_is_kept(tmp_path: Path) -> None:
    last = dataclasses.replace(RESULT, date="2026-11-29 12:00+00:00")
    for result in (RESULT, dataclasses.replace(RESULT, cards=["Card Y"]), last):
        gpu_page.take_over(saved(tmp_path / "run", result), tmp_path / "results")
    assert [path.name for path in sorted((tmp_path / "results").iterdir())] == [
        "card-x1-answers.json",
        "card-y-answers.json",
    ]
    assert gpu_page.results(tmp_path / "results")[0] == last


@pytest.mark.parametrize(
    ("value", "wanted", "met"),
    [(0.95, ">= 0.95", True), (0.94, ">= 0.95", False), (0, "== 0", True), (1, "<= 0.5", False), (1, None, None)],
)
def test_what_is_wanted_of_a_figure(value: float, wanted: str | None, met: bool | None) -> None:
    assert Figure("name", value, "unit", wanted).met is met
