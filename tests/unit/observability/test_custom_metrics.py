"""What several processes count themselves, as one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from doubles import written
from nerite.observability.custom_metrics import ReportedMetrics, write
from nerite.observability.exposition import Metric, MetricTable, Page
from triton_python_backend_utils.metrics import MetricKind, MetricStore


class Process:
    """A process whose models count."""

    def __init__(self) -> None:
        self.store = MetricStore()

    def metric(self, name: str, kind: MetricKind, *bounds: float, **labels: str) -> tuple[Any, Any]:
        holding = self.store.family(name, f"about {name}", kind)
        return holding, self.store.metric(holding, labels, bounds)

    @property
    def sent(self) -> Any:
        return json.loads(json.dumps(self.store.collect()))


def page(*processes: Process, taken: tuple[str, ...] = ()) -> list[str]:
    readings = [reading for process in processes for reading in process.sent]

    def write_page(page: Page) -> None:
        page.write(MetricTable[None]([Metric(name, "counter", "", lambda _: None) for name in taken]), [])
        write(readings, page)

    return written(write_page).decode().splitlines()


def test_counters_and_histograms_add_up() -> None:
    first, second = Process(), Process()
    for process, amount in ((first, 2), (second, 0.5)):
        process.store.increment(*process.metric("rows", MetricKind.COUNTER, model="m"), amount)
        process.store.observe(*process.metric("size", MetricKind.HISTOGRAM, 1, 10), amount)
    assert page(first, second) == [
        "# HELP rows about rows",
        "# TYPE rows counter",
        'rows{model="m"} 2.5',
        "# HELP size about size",
        "# TYPE size histogram",
        'size_bucket{le="1"} 1',
        'size_bucket{le="10"} 2',
        'size_bucket{le="+Inf"} 2',
        "size_sum 2.5",
        "size_count 2",
    ]


def test_a_gauge_that_is_set_tells_the_last_value_and_others_add_up() -> None:
    first, second = Process(), Process()
    for process, amount in ((first, 3), (second, 4)):
        process.store.increment(*process.metric("under_way", MetricKind.GAUGE), amount)
        process.metric("level", MetricKind.GAUGE)
    second.store.set(*second.metric("level", MetricKind.GAUGE), 7)
    first.store.set(*first.metric("level", MetricKind.GAUGE), 5)
    assert page(first, second)[2::3] == ["under_way 7", "level 5"]


def test_names_that_are_taken_or_mean_something_else_elsewhere() -> None:
    first, second = Process(), Process()
    first.store.increment(*first.metric("nv_inference_count", MetricKind.COUNTER), 1)
    first.store.increment(*first.metric("a", MetricKind.COUNTER), 1)
    second.store.set(*second.metric("a", MetricKind.GAUGE), 9)
    second.store.family("nobody", "has no metrics", MetricKind.GAUGE)
    assert page(first, second, taken=("nv_inference_count",))[4:] == ["a 1"]


def test_what_was_counted_outlives_the_process() -> None:
    of = ReportedMetrics()
    for _ in range(3):
        process = Process()
        process.store.increment(*process.metric("rows", MetricKind.COUNTER), 2)
        process.store.set(*process.metric("level", MetricKind.GAUGE), 1)
        of.reported(1, process.sent)
        of.process_ended()
    assert written(lambda page: write(of.readings, page)).decode().splitlines()[2:] == ["rows 6"]
    assert len(of.readings) == 1


def test_a_page_waits_for_what_was_announced() -> None:
    async def read() -> list[bool]:
        of = ReportedMetrics()
        waiting: list[asyncio.Task[None]] = []

        async def is_complete() -> bool:
            waiting.append(asyncio.create_task(of.complete()))
            await asyncio.sleep(0)
            return waiting[-1].done()

        found = [await is_complete()]
        of.due(3)
        found.append(await is_complete())
        of.reported(2, [])
        found.append(await is_complete())
        of.reported(3, [])
        await asyncio.gather(*waiting)
        found.append(await is_complete())
        of.due(4)
        of.process_ended()
        found.append(await is_complete())
        of.due(1)  # of the next process
        of.reported(1, [])
        return [*found, await is_complete()]

    assert asyncio.run(read()) == [True, False, False, True, True, True]


def test_the_store_says_once_that_something_has_changed() -> None:
    process = Process()
    told: list[None] = []
    process.store.on_change = lambda: told.append(None)
    metric = process.metric("rows", MetricKind.COUNTER)
    process.store.increment(*metric, 1)
    assert len(told) == 1
    process.store.collect()
    process.store.increment(*metric, 1)
    process.store.increment(*metric, 1)
    assert len(told) == 2
