"""What the console shows of the loops beside the requests, and its buttons for what was set aside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, browsing
from planted_work import set_units, within
from serving import Serving, eventually, serving

NOTICE = "document.getElementById('notice').innerText"
ROWS = "[...document.querySelectorAll('main tbody tr')].map((row) => row.innerText.replaceAll(/\\s+/g, ' '))"
CLICK = "document.querySelector('[aria-label=\"{}\"]').click()"
RED = "document.querySelector('header [href=\"#/background\"]').classList.contains('bad')"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    (tmp_path / "chromium").mkdir()
    with browsing(tmp_path / "chromium") as running:
        running.size(1280, 900)
        yield running


def aside(running: Serving) -> float:
    return running.metrics().get('nerite_background_set_aside{about="planted",loop="webhooks"}', 0)


def test_what_stands_is_red_and_can_be_retried_or_discarded(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    set_units(tmp_path, "good", "poison-1", "poison-2")
    flags = ("--http-restricted-api=model-repository:X-Admin=sesame",)
    with serving(
        tmp_path / "models", tmp_path / "log", *flags, within=within(tmp_path), internal_errors=True
    ) as server:
        browser.open(f"http://{server.http}/ui#/background")
        browser.until("document.querySelector('dialog[open] code')?.innerText === 'X-Admin'")
        browser.press(*"sesame", "Enter")
        browser.until(f"{NOTICE} === 'Background: webhooks has set 2 aside.'")
        assert browser.evaluate(RED)
        browser.until(f"{ROWS}.some((row) => row.startsWith('poison-1 webhooks (planted) alice '))")
        assert browser.evaluate(f"{ROWS}.some((row) => row.startsWith('audit ok 1 0 0 0'))")

        browser.evaluate(CLICK.format("Discard poison-1"))
        browser.until("!!document.querySelector('dialog[open]')")
        browser.press("Escape")
        browser.until("!document.querySelector('dialog[open]')")
        assert not (tmp_path / "discarded").exists()
        browser.evaluate(CLICK.format("Discard poison-1"))
        browser.until("!!document.querySelector('dialog[open]')")
        browser.press("Enter")
        browser.until(f"!{ROWS}.some((row) => row.startsWith('poison-1 '))")
        assert (tmp_path / "discarded").read_text() == "poison-1\n"

        browser.evaluate(CLICK.format("Retry poison-2"))
        eventually(lambda: server.metrics()['nerite_background_failures_total{about="planted",loop="webhooks"}'] == 6)
        set_units(tmp_path, "good")
        eventually(lambda: aside(server) == 1)
        browser.until("!!document.querySelector('[aria-label=\"Discard poison-2\"]')")
        browser.evaluate(CLICK.format("Discard poison-2"))
        browser.until("!!document.querySelector('dialog[open]')")
        browser.press("Enter")
        browser.until(f"document.getElementById('notice').hidden && !{RED}")

        (tmp_path / "stuck").touch()
        browser.until(f"{NOTICE} === 'Background: webhooks is stalled.'")
        browser.until(
            f"{ROWS}.some((row) => row.startsWith('webhooks (planted) stalled 1 6 0 0 nothing has advanced'))"
        )
        browser.until(f"{ROWS}.some((row) => row.startsWith('disk webhooks (planted) the disk is full'))")
        (tmp_path / "stuck").unlink()
        browser.until("document.getElementById('notice').hidden")
    assert [each for each in browser.complaints if "403" not in each] == []
