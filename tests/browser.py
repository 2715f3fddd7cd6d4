"""A real Chromium for tests, driven over a pipe with the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving import PATIENCE
from tools import require

_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " ")}


class Browser:
    """A browser with one page. What the page asked for and complained about is kept."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.process = process
        self.requests: list[str] = []
        """Addresses, in the order in which they were asked for."""
        self.complaints: list[str] = []
        """What stands in the console of the page, and what it could not do."""
        self._to, self._back = to, back
        self._rest = b""
        self._number = 0
        self.session = ""

    def begin(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                result: dict[str, Any] = heard["result"]
                return result
            self._note(heard)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression on the page, awaited."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"], indent=1))
        return done["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def until(self, condition: str, seconds: float = 45.0) -> Any:
        """Wait until an expression of data holds on the page; return its value. Fails with what the page shows."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(condition)):
            if time.monotonic() > deadline:
                raise AssertionError(f"never: {condition}\n{self.text}\n{self.complaints}")
            time.sleep(0.02)
        return value

    @property
    def text(self) -> str:
        """What the page shows."""
        shown: str = self.evaluate("document.body?.innerText ?? ''")
        return shown

    def press(self, *keys: str) -> None:
        """Press keys, one after the other: names, or characters."""
        for key in keys:
            code, text = _KEYS[key] if key in _KEYS else (ord(key.upper()) if key.isalnum() else 0, key)
            known = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
            self.call("Input.dispatchKeyEvent", type="keyDown", **known)
            self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def tab_to(self, condition: str, most: int = 60) -> None:
        """Press Tab until an expression about ``document.activeElement`` holds."""
        for _ in range(most):
            self.press("Tab")
            if self.evaluate(condition):
                return
        raise AssertionError(f"the keyboard does not lead to {condition}")

    def point(self, element: str) -> None:
        """Move the pointer to the middle of an element."""
        box = self.evaluate(f"(({element}).scrollIntoView(), ({element}).getBoundingClientRect().toJSON())")
        middle = {"x": box["left"] + box["width"] / 2, "y": box["top"] + box["height"] / 2}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **middle)

    def picture(self, path: Path) -> None:
        """Write what the page looks like as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._back], [], [], PATIENCE)[0]:
                raise TimeoutError("the browser says nothing")
            part = os.read(self._back, 1 << 16)
            if not part:
                raise RuntimeError("the browser is gone")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(message)
        return heard

    def _note(self, heard: dict[str, Any]) -> None:
        told = heard.get("params", {})
        match heard.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Run a browser, whose files are in ``folder``. Skips the test, or fails it in CI, without Chromium."""
    require("chromium", "bash")
    told, to = os.pipe()
    back, said = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    flags += ["--no-first-run", "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={folder}"]
    # It speaks the protocol on 3 and 4.
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{told} 4>&{said}', "chromium", *flags]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=(told, said), stdout=log, stderr=log)
    os.close(told)
    os.close(said)
    browser = Browser(process, to, back)
    try:
        browser.begin()
        yield browser
        browser.session = ""
        browser.call("Browser.close")
        process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(to)
        os.close(back)
