"""What the documents say is so: paths exist, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def test_paths_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = set(re.findall(r"`((?:src|tests|docs)/[\w/.]+)`", text))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_architecture_fits_on_one_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Glossary")[0]
    assert len(page.splitlines()) <= 80


def test_the_tour_is_ten_files_that_can_be_read_at_once() -> None:
    text = (ROOT / "docs" / "tour.md").read_text()
    files = [ROOT / path for path in re.findall(r"^\d+\. `([\w/.]+)`", text, re.MULTILINE)]
    assert len(files) == 10
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    links = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text()))
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert sorted(pages - links) == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(((?:[^)#\s:]+\.md)?)#([^)\s]+)\)", page.read_text())
    targets = [((page.parent / link) if link else page, anchor) for link, anchor in links]
    assert [f"{target}#{anchor}" for target, anchor in targets if anchor not in anchors(target)] == []


def test_the_comparison_is_complete() -> None:
    """Every server is in every row, with as many marks as the row has questions, and its pages are named."""
    text = (ROOT / "docs" / "comparison.md").read_text()
    servers = re.findall(r"^\| \[(\w+)\]\(#", text, re.MULTILINE)
    assert len(servers) == 7
    for server in servers:
        _, _, section = text.partition(f"### {server}\n")
        assert "](https://" in section.partition("###")[0], server
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if re.match(r"\| [^|]+( \| [^|]*){8} \|$", line)]
    assert len(rows) > 35
    marks = [(head, cell) for head, *cells in rows for cell in cells if ";" in head]
    counted = [(head, cell, len(re.findall("[✓◐\\u2013]", cell))) for head, cell in marks]
    wrong = [(head, cell) for head, cell, count in counted if count not in (1, head.count(";") + 1)]
    assert wrong == []


def test_the_glossary_names_classes_that_there_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Glossary")[2]
    named = set(re.findall(r"`([A-Z]\w+)`", text))
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert len(named) > 40
    assert sorted(name for name in named if not re.search(rf"^class {name}\b", source, re.MULTILINE)) == []
