"""Headless Chromium for tests, driven through its debugging pipe.

Messages of the DevTools protocol are JSON and end with a zero byte. The browser reads messages from its file
descriptor 3, and writes messages to its descriptor 4.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ABSENT = "no chromium found: apt-get install chromium"

PATIENCE = 60.0  # most seconds to wait for an answer; long, because test machines are busy

OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


class Browser:
    """Runs one browser process, and calls its DevTools methods."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, ABSENT
        # The child's ends get numbers above 3 and 4, because the child duplicates them onto 3 and 4.
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        self._process = subprocess.Popen(
            [
                "bash",  # bash accepts descriptor numbers of more than one digit
                "-c",
                f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-',
                CHROMIUM,
                *OPTIONS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _close((theirs_in, theirs_out))
        self._buffer = b""
        self._calls = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # the browser exits when its pipe closes
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result; keep events that arrive before the result."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._calls:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def wait(self, method: str, session: str) -> dict[str, Any]:
        """Return the first event of this kind in a session; wait for it if none has arrived yet."""
        while True:
            for event in self.events:
                if (event.get("method"), event.get("sessionId")) == (method, session):
                    return event
            self.events.append(self._message())

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._in], [], [], max(0.0, left))
            assert readable, f"chromium said nothing for {PATIENCE:g} s"
            said = os.read(self._in, 1 << 16)
            assert said, "chromium has ended"
            self._buffer += said
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


def _pipe() -> tuple[int, int]:
    """Return the reading and the writing end of a pipe. Both descriptor numbers are at least 10, so they never collide with 3 and 4."""
    low = os.pipe()
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    _close(low)
    return reading, writing


def _close(descriptors: Iterable[int]) -> None:
    for each in descriptors:
        os.close(each)


class BrowserPage:
    """Represents a file that is open in the browser, with the events that it has caused."""

    def __init__(self, browser: Browser, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self._url = path.as_uri()
        self.call("Page.navigate", url=self._url)
        browser.wait("Page.loadEventFired", self._session)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def ask(self, expression: str) -> Any:
        """Evaluate a JavaScript expression on the page, even if the page's content security policy forbids scripts."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def asked_for(self) -> list[str]:
        """The addresses that the page has requested, without its own address."""
        sent = self._seen("Network.requestWillBeSent")
        return [url for each in sent if (url := each["request"]["url"]) != self._url]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """The page's console messages, log entries, dialogs and uncaught script errors."""
        kinds = (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
        )
        return [event for kind in kinds for event in self._seen(kind)]

    def _seen(self, method: str) -> list[dict[str, Any]]:
        self.ask("0")  # all earlier events have arrived when this call returns
        mine = (event for event in self._browser.events if event.get("sessionId") == self._session)
        return [event["params"] for event in mine if event["method"] == method]
