"""A headless Chromium, driven by the DevTools protocol over a pair of pipes (``--remote-debugging-pipe``)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

PATIENCE_S = 60.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page. Whatever its console complains of is kept."""

    def __init__(self, to: int, come: int) -> None:
        self._to = trio.lowlevel.FdStream(to)
        self._from = trio.lowlevel.FdStream(come)
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._buffer = b""
        self._loaded = False
        self.complaints: list[str] = []

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._to.send_all(json.dumps(message).encode() + b"\0")
        with trio.fail_after(PATIENCE_S):
            while (heard := await self._hear()).get("id") != number:
                self._note(heard)
        assert "error" not in heard, heard
        return heard.get("result")

    async def _hear(self) -> Any:
        while b"\0" not in self._buffer:
            chunk = await self._from.receive_some()
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        self._loaded |= event.get("method") == "Page.loadEventFired"
        if event.get("method") == "Log.entryAdded":
            self.complaints.append(event["params"]["entry"]["text"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]["exceptionDetails"]))

    async def go(self, url: str) -> None:
        self._loaded = False
        await self.call("Page.navigate", url=url)
        with trio.fail_after(PATIENCE_S):
            while not self._loaded:
                self._note(await self._hear())

    async def value(self, expression: str) -> Any:
        """What JavaScript says, awaited."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The expression's value once it is true."""
        with trio.fail_after(PATIENCE_S):
            look = f"const look = () => {{ const value = {expression}; value ? done(value) : setTimeout(look, 20); }}"
            return await self.value(f"new Promise((done) => {{ {look}; look(); }})")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        more = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **more)

    async def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """A fresh browser with a profile of its own."""
    assert CHROMIUM is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server",
        "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    # The protocol wants descriptors 3 and 4, which are whatever they are in this process.
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', CHROMIUM, *options]
    process = await trio.lowlevel.open_process(
        command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    page = Browser(ours_out, ours_in)
    try:
        await page.open()
        yield page
    finally:
        with trio.CancelScope(shield=True):
            process.terminate()
            await process.wait()
            await page._to.aclose()
            await page._from.aclose()
