"""Controls a real Chromium without a driver, through its own protocol over two pipes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-extensions", "--disable-background-networking",
    "--remote-debugging-pipe",
)  # fmt: skip

_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that turns into the browser, which reads requests from 3 and writes replies to 4."""


class Page:
    """One tab. `errors` lists errors of scripts and violations of the content policy."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies, self.buffer, self.number = requests, replies, b"", 0
        self.errors: list[str] = []
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        request: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.requests, json.dumps(request).encode() + b"\0")
        while (message := self._message()).get("id") != self.number:
            self._note(message)
        assert "error" not in message, message["error"]
        result: dict[str, Any] = message["result"]
        return result

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        state = f"location.href === {json.dumps(path.as_uri())} && document.readyState"
        while self.value(state) != "complete":
            time.sleep(0.05)

    def value(self, script: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def press(self, key: str, ctrl: bool = False) -> None:
        text = "\r" if key == "Enter" else "" if ctrl or len(key) > 1 else key
        codes = {"Enter": 13, "ArrowRight": 39}
        press = {"key": key, "modifiers": 2 * ctrl, "text": text,
                 "windowsVirtualKeyCode": codes.get(key, 0)}  # fmt: skip
        self.call("Input.dispatchKeyEvent", type="keyDown", **press)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            part = os.read(self.replies, 1 << 16)
            assert part, "the browser has ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(json.dumps(message["params"]))


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, with descriptors from 20 on, because 3 and 4 are overwritten."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


@contextmanager
def browser(home: Path) -> Iterator[Page]:
    """A tab of a new browser with its profile and downloads in `home`."""
    assert BROWSER is not None
    request_out, request_in = _pipe()
    reply_out, reply_in = _pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(request_out), str(reply_in), BROWSER, *_FLAGS,
         f"--user-data-dir={home / 'profile'}"],
        pass_fds=(request_out, reply_in), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(request_out)
    os.close(reply_in)
    try:
        page = Page(request_in, reply_out)
        downloads = str(home / "downloads")
        page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=downloads)
        yield page
    finally:
        os.close(request_in)
        os.close(reply_out)
        process.terminate()
        process.wait(20)
