"""A headless Chromium that opens pages, follows links, and tells of the errors of its console."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.cli.browser import installed

ERRORS = {"Runtime.exceptionThrown", "Log.entryAdded"}


class Browser:
    """Speaks the DevTools protocol over two pipes, for which a browser needs no port and Python no package."""

    def __init__(self, folder: Path, need: Callable[[object, str], None]) -> None:
        theirs, self.ours = os.pipe()
        heard, answers = os.pipe()
        words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--remote-debugging-pipe"]
        line = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash", installed(need), *words]
        self.child = subprocess.Popen(line, pass_fds=(theirs, answers), stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(answers)
        self.heard = os.fdopen(heard, "rb", buffering=0)
        self.rest = b""
        self.session: dict[str, str] = {}
        self.number = 0
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.terminate()
        self.child.wait(20)
        os.close(self.ours)
        self.heard.close()

    def _next(self) -> dict[str, Any]:
        """Returns the next message; a page's errors are kept."""
        while b"\0" not in self.rest:
            part = self.heard.read(1 << 16)
            assert part, "the browser has ended"
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in ERRORS or message.get("params", {}).get("type") == "error":
            self.errors.append(json.dumps(message["params"]))
        return message

    def ask(self, method: str, **parameters: object) -> dict[str, Any]:
        """Returns the answer to a command."""
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters, **self.session}
        os.write(self.ours, json.dumps(request).encode() + b"\0")
        while (message := self._next()).get("id") != self.number:
            pass
        assert "error" not in message, message
        answer: dict[str, Any] = message["result"]
        return answer

    def open(self, address: str) -> None:
        """Opens a page and waits until it is loaded."""
        if not self.session:
            target = self.ask("Target.createTarget", url="about:blank")["targetId"]
            self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
            for domain in ("Page", "Runtime", "Log"):
                self.ask(f"{domain}.enable")
        answer = self.ask("Page.navigate", url=address)
        assert "errorText" not in answer, (address, answer)
        self.wait()

    def wait(self) -> None:
        """Waits until a page is loaded."""
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression of JavaScript on the page; of a promise, the value that it gets."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
