"""``nerite bench compare``: compares reports of ``nerite bench``, and says which differences are beyond the noise."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from nerite.cli.command import new_parser, show, show_table, status_of
from nerite.client import ClientError
from nerite.tools.bench import report
from nerite.tools.bench.noise import Change, change, half_width
from nerite.tools.bench.provenance import Provenance
from nerite.tools.bench.report import ErrorBar

_PROGRAM: Final = "nerite bench compare"
_EPILOG = """\
Reports are what nerite bench --json FILE writes. The first is compared to each of the others, at the levels of load
that both have. A difference is beyond the noise if Welch's t-test on the windows says so with 95 % confidence. Two runs
differ by more than the windows of one do: repeat the runs, and join the reports of each side by commas, so that the
runs are compared instead of the windows.
The exit status is 0 for success, 1 if reports cannot be compared, 2 for an invalid command line.

Examples:
  nerite bench compare before.json after.json --html compared.html
  nerite bench compare before1.json,before2.json,before3.json after1.json,after2.json,after3.json
"""

_NAMES: Final = {
    "requests_per_second": ("requests/s", True),
    "mean_latency_ms": ("mean ms", False),
    "p50_latency_ms": ("p50 ms", False),
    "p90_latency_ms": ("p90 ms", False),
    "p99_latency_ms": ("p99 ms", False),
    "p50_time_to_first_ms": ("first token p50 ms", False),
    "p99_time_to_first_ms": ("first token p99 ms", False),
    "mean_inter_token_ms": ("between tokens ms", False),
    "tokens_per_second": ("tokens/s", True),
    "texts_per_second": ("texts/s", True),
    "good_requests_per_second": ("good requests/s", True),
}
"""Each figure's name in tables, and whether more of it is better."""

# Reports and their figures.


class LevelKey(NamedTuple):
    """A level of load, which is the same in all reports."""

    kind: str
    value: float
    arrivals: str = ""

    def __str__(self) -> str:
        arrivals = f", {self.arrivals}" if self.arrivals not in ("", "constant") else ""
        return f"{self.kind} {self.value:g}{arrivals}"


@dataclass(frozen=True, slots=True)
class BenchedSide:
    """One side of a comparison: a report, or the reports of repeated runs."""

    name: str
    model: str
    origins: tuple[Provenance, ...]
    levels: Mapping[LevelKey, Mapping[str, Sequence[float]]]
    """Values of each figure at each level: of the windows of a run, or of each run if there are several."""
    overall: Mapping[LevelKey, Mapping[str, float]]
    """Figures over all of the measurement, on average over the runs."""
    failed: Mapping[LevelKey, int]
    unstable: Collection[LevelKey] = ()
    """Levels whose windows did not agree."""


def side_of(name: str, documents: Sequence[Mapping[str, Any]]) -> BenchedSide:
    """Return a side from one or more reports of repeated runs. Raises ``ClientError`` if their levels differ."""
    runs = [{_key(level, name): level for level in document["levels"]} for document in documents]
    keys = list(runs[0])
    if any(set(run) != set(keys) for run in runs):
        raise ClientError(f"{name}: these runs have different levels of load, so that they are no repetitions")
    values = {key: [report.level_values(run[key]) for run in runs] for key in keys}
    overall = {
        key: {figure: fmean(each[figure] for each in found) for figure in found[0] if all(figure in e for e in found)}
        for key, found in values.items()
    }
    if len(runs) == 1:
        samples: Mapping[LevelKey, Mapping[str, Sequence[float]]] = {
            key: report.level_samples(level) for key, level in runs[0].items()
        }
    else:
        samples = {
            key: {figure: [each[figure] for each in found] for figure in overall[key]} for key, found in values.items()
        }
    origins = tuple(Provenance.from_json(document.get("provenance") or {}) for document in documents)
    failed = {key: sum(int(run[key].get("failed", 0)) for run in runs) for key in keys}
    unstable = [key for key in keys if any(run[key].get("stable") is False for run in runs)]
    return BenchedSide(name, str(documents[0].get("model", "")), origins, samples, overall, failed, unstable)


def _key(level: Mapping[str, Any], name: str) -> LevelKey:
    for kind in ("concurrency", "rate"):
        if kind in level:
            arrivals = str(level.get("arrivals", ""))
            if arrivals == "gamma":
                arrivals = f"gamma {level.get('burstiness', 1.0):g}"
            return LevelKey(kind, float(level[kind]), arrivals)
    raise ClientError(f"{name} has a level without a concurrency or rate")


class ComparedFigure(NamedTuple):
    """A figure of two sides at one level."""

    level: LevelKey
    figure: str
    change: Change

    @property
    def verdict(self) -> str:
        """``better`` or ``worse``, or ``noise`` if the difference may be chance, or ``unknown``."""
        if math.isinf(self.change.margin):
            return "unknown"
        if not self.change.beyond_noise:
            return "noise"
        return "better" if (self.change.after > self.change.before) == _NAMES[self.figure][1] else "worse"


def compared(one: BenchedSide, other: BenchedSide) -> list[ComparedFigure]:
    """Return the figures that both sides have. Raises ``ClientError`` if they have no level in common."""
    common = [key for key in one.levels if key in other.levels]
    if not common:
        mine, its = (", ".join(map(str, side.levels)) for side in (one, other))
        raise ClientError(
            f"{one.name} and {other.name} have no level of load in common.\n"
            f"    {one.name}: {mine}\n    {other.name}: {its}\n    Measure both at the same --concurrency or --rate."
        )
    found = []
    for key in common:
        for figure in _NAMES:
            if figure in one.overall[key] and figure in other.overall[key]:
                tested = change(
                    one.levels[key].get(figure) or [one.overall[key][figure]],
                    other.levels[key].get(figure) or [other.overall[key][figure]],
                )
                shown = tested._replace(before=one.overall[key][figure], after=other.overall[key][figure])
                # The test is about the means of the samples; the figures over all windows may differ from these.
                agrees = (tested.after - tested.before) * (shown.after - shown.before) > 0
                found.append(ComparedFigure(key, figure, shown if agrees or not tested.beyond_noise else tested))
    return found


def differences(one: BenchedSide, other: BenchedSide) -> Iterator[str]:
    """Yield what else differs, besides what was to be compared."""
    if one.model != other.model:
        yield f"The models differ: {one.model} and {other.model}."
    first, second = one.origins[0], other.origins[0]
    for name in dict.fromkeys([*first.machine, *second.machine]):
        values = [str(origin.machine.get(name, "unknown")) for origin in (first, second)]
        if values[0] != values[1]:
            yield f"The machines differ: {name} {values[0]} and {values[1]}."
    if first.server_version != second.server_version:
        yield f"The servers differ: {first.server_version or 'unknown'} and {second.server_version or 'unknown'}."
    for side, missing_package in ((one, other), (other, one)):
        only = [str(key) for key in side.levels if key not in missing_package.levels]
        if only:
            yield f"Only in {side.name}: {', '.join(only)}."
    for side in (one, other):
        if side.unstable:
            yield f"Not stable in {side.name}: {', '.join(map(str, side.unstable))}. A longer --window may help."
        for key, count in side.failed.items():
            if count:
                yield f"{count} requests failed in {side.name} at {key}: its figures are of the others."


# Output.

_HEADINGS: Final = ("Level", "Figure", "Before", "After", "Change", "Verdict")
_VERDICTS: Final = {
    "better": "better",
    "worse": "worse",
    "noise": "within the noise",
    "unknown": "unknown: one value each",
}


def rows(figures: Sequence[ComparedFigure], one: BenchedSide, other: BenchedSide) -> Iterator[list[str]]:
    """Yield a table row for each figure."""
    for found in figures:
        (
            key,
            figure,
            changed,
        ) = found
        yield [
            str(key),
            _NAMES[figure][0],
            _with_error(changed.before, one.levels[key].get(figure, ())),
            _with_error(changed.after, other.levels[key].get(figure, ())),
            "new" if math.isinf(changed.percent) else f"{changed.percent:+.1f} %",
            _VERDICTS[found.verdict],
        ]


def _with_error(value: float, sample: Sequence[float]) -> str:
    error = half_width(sample)
    return f"{report.plot_figure(value)}{f' ± {report.plot_figure(error)}' if error else ''}"


def run(arguments: Sequence[str]) -> int:
    """Run the comparison; return the exit status."""
    return status_of(_PROGRAM, lambda: _compare(_parse(arguments)), ClientError)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(_PROGRAM, "Compare reports of nerite bench.", _EPILOG)
    parser.add_argument("reports", metavar="REPORT", nargs="+", help="JSON file, or those of repeated runs with commas")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a self-contained HTML page with plots")
    options = parser.parse_args(arguments)
    if len(options.reports) < 2:
        parser.error("two or more reports are needed: nerite bench compare before.json after.json")
    return options


def _compare(options: argparse.Namespace) -> int:
    sides = [_read(text) for text in options.reports]
    first, others = sides[0], sides[1:]
    sections = []
    for other in others:
        figures = compared(first, other)
        table = [list(_HEADINGS), *rows(figures, first, other)]
        told = list(differences(first, other))
        title = f"{first.name} and {other.name}"
        show(f"Before: {first.name}. After: {other.name}.")
        show_table(table[0], table[1:])
        for remark in told:
            show(remark)
        sections.append((title, figures, table, told))
    for side in sides:
        for origin in side.origins:
            show(f"\n{side.name}")
            for name, fact in origin.facts():
                if fact:
                    show(f"  {name}: {fact}")
    if options.html is not None:
        report.write_file(options.html, _page(sides, sections))
    return 0


def _read(text: str) -> BenchedSide:
    documents = []
    for part in text.split(","):
        path = Path(part)
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise ClientError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            document = None
        levels = document.get("levels") if isinstance(document, dict) else None
        if not isinstance(levels, list) or not levels or not all(isinstance(level, dict) for level in levels):
            raise ClientError(f"{path} is not a report: write one with nerite bench MODEL --json {path}")
        documents.append(document)
    name = " + ".join(Path(part).stem for part in text.split(","))
    return side_of(name, documents)


Section = tuple[str, Sequence[ComparedFigure], Sequence[Sequence[str]], Sequence[str]]


def _page(sides: Sequence[BenchedSide], sections: Sequence[Section]) -> str:
    models = " and ".join(dict.fromkeys(side.model for side in sides))
    body = report.opening(
        f"{models}: {' and '.join(side.name for side in sides)}",
        ["compared at the same levels of load", "error bars are 95 % confidence intervals"],
        dict.fromkeys(remark for _, _, _, told in sections for remark in told),
    )
    body.append(report.key(_key_numbers(sections)))
    body.append(report.plots(_plots(sides)))
    for title, _, table, _ in sections:
        body += [f"<h2>{escape(title)}</h2>", report.html_table(table)]
    body.append(report.origin([(side.name, origin) for side in sides for origin in side.origins]))
    return report.document(f"{models}: compared", body)


def _key_numbers(sections: Sequence[Section]) -> Iterator[tuple[str, str]]:
    for title, figures, _, _ in sections:
        verdicts = [found.verdict for found in figures]
        counts = [f"{verdicts.count(kind)} {_VERDICTS[kind]}" for kind in _VERDICTS if kind in verdicts]
        rates = [found for found in figures if found.figure == "requests_per_second"]
        most = max(rates, key=lambda found: found.change.before)
        yield (
            f"{most.change.percent:+.1f} %",
            f"requests per second at {most.level}: {_VERDICTS[most.verdict]} ({title})",
        )
        yield f"{len(figures)} figures", ", ".join(counts)


def _plots(sides: Sequence[BenchedSide]) -> Iterator[str]:
    keys = [key for key in sides[0].levels if all(key in side.levels for side in sides)]
    names = [side.name for side in sides]
    for figure, (unit, more) in _NAMES.items():
        if not keys or not all(figure in side.overall[key] for side in sides for key in keys):
            continue
        bars = [
            ErrorBar(str(key), side.overall[key][figure], half_width(side.levels[key].get(figure, ())), colour)
            for key in keys
            for colour, side in enumerate(sides)
        ]
        meaning = "More is better." if more else "Less is better."
        yield report.html_figure(unit, meaning, report.error_bars("", bars, names))
