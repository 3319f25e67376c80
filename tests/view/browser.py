"""Debian's Chromium without a window, driven over a pipe with the DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]
LIMIT = 60.0
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}


class Browser:
    """One Chromium with one page. A context manager."""

    def __init__(self, profile: Path) -> None:
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
        command = [str(CHROMIUM), *flags, f"--user-data-dir={profile}", "about:blank"]
        # The browser reads from 3 and writes to 4; numbers from 20 on, so that neither overwrites the other.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (reads, writes)]
        shell = ["bash", "-c", 'exec "$@" 3<&{} 4>&{}'.format(*ends), "bash", *command]
        self._process = subprocess.Popen(shell, pass_fds=ends, stderr=subprocess.DEVNULL)
        for end in (reads, writes, *ends):
            os.close(end)
        self._number, self._rest, self._session = 0, b"", ""
        self.requests: list[str] = []
        self.problems: list[str] = []

    def __enter__(self) -> Browser:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], max(0, deadline - time.monotonic()))[0], "the browser is silent"
            self._rest += os.read(self._from, 1 << 20)
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(event["params"]["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(str(event["params"]["entry"]))

    def open(self, page: Path, tab: str = "", width: int = 1200, height: int = 900) -> None:
        """Load a page and wait until its program has run."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=f"{page.as_uri()}#{tab}")
        self.until("document.documentElement?.dataset.ready === 'yes'")

    def value(self, expression: str) -> Any:
        """The value of an expression in the page, once it is there."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a condition holds in the page, which may still be loading."""
        deadline = time.monotonic() + LIMIT
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not {condition}: {self.problems}"

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a selector."""
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")

    def click(self, selector: str, number: int = 0) -> None:
        """Click on the middle of an element."""
        x, y = self.middle(selector, number)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector: str, start: float, stop: float) -> None:
        """Drag over an element, from one share of its width to another."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        left, width, top, height = self.value(f"(({{left, width, top, height}}) => [left, width, top, height])({box})")
        y = top + height / 2
        for kind, share in (("mousePressed", start), ("mouseMoved", stop), ("mouseReleased", stop)):
            place = {"x": left + share * width, "y": y}
            self.send("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)

    def hover(self, selector: str, number: int = 0) -> None:
        x, y = self.middle(selector, number)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str, number: int) -> tuple[float, float]:
        """Where the middle of an element is, which is scrolled into sight."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        self.value(f"{element}.scrollIntoView({{block: 'center'}})")
        box = f"{element}.getBoundingClientRect()"
        x, y = self.value(f"((b) => [b.left + b.width / 2, b.top + b.height / 2])({box})")
        return x, y

    def key(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        code = KEYS.get(key, ord(key[0].upper()))
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def screenshot(self, file: Path) -> None:
        """Write what is in sight to a PNG."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


def numbers_of_step(browser: Browser, step: int) -> dict[str, float]:
    """The numbers that the table of steps, which must be open, shows of a step: name -> value with all its digits."""
    browser.value(f"step.value = {step}, step.dispatchEvent(new Event('change'))")
    rows = browser.value(
        "[...document.querySelectorAll('#step-table tr')].slice(1).map((row) =>"
        " [row.children[0].textContent, row.children[1].dataset.value])"
    )
    return {name: float(value) for name, value in rows if value is not None}
