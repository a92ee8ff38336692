"""An editor without a screen: a client of language servers over their standard input and output."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

TIMEOUT_S = 60.0
"""Seconds to wait for a message; a server on a busy machine takes several to start."""


class Editor:
    """One running server with the files of one folder open. Use it in a `with` block.

    The protocol is JSON-RPC with a Content-Length header: https://microsoft.github.io/language-server-protocol.
    """

    def __init__(self, command: Sequence[str], folder: Path, settings: dict[str, Any] | None = None) -> None:
        """Starts the server; `settings` are answers to its questions about configuration, by section."""
        self._settings = settings or {}
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)
        self._received: queue.Queue[dict[str, Any]] = queue.Queue()
        self._diagnostics: dict[str, list[dict[str, Any]]] = {}
        self._last_id = 0
        threading.Thread(target=self._read, daemon=True).start()
        capabilities = {
            "workspace": {"configuration": True},
            "textDocument": {"completion": {"completionItem": {"documentationFormat": ["plaintext"]}}},
        }
        self.request(
            "initialize",
            processId=None,
            rootUri=folder.as_uri(),
            capabilities=capabilities,
            initializationOptions={"handledSchemaProtocols": ["file"]},
        )
        self._notify("initialized")

    def __enter__(self) -> Editor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.terminate()
        self._server.wait(TIMEOUT_S)
        for stream in (self._server.stdin, self._server.stdout):
            assert stream is not None
            stream.close()

    def open(self, path: Path, text: str) -> list[dict[str, Any]]:
        """Opens a file with a text that need not be on the disk; returns what the server underlines in it."""
        uri = path.as_uri()
        if self._diagnostics.pop(uri, None) is not None:
            self._notify("textDocument/didClose", textDocument={"uri": uri})
            while self._diagnostics.pop(uri, None) != []:  # a server takes its marks away when a file is closed
                self._take()
        language = "yaml" if path.suffix == ".yaml" else "json"
        self._notify(
            "textDocument/didOpen",
            textDocument={"uri": uri, "languageId": language, "version": 1, "text": text},
        )
        while uri not in self._diagnostics:
            self._take()
        return self._diagnostics[uri]

    def complete(self, path: Path, line: int, column: int) -> dict[str, dict[str, Any]]:
        """Returns what the server offers at a place (from 0), by label."""
        found = self.request("textDocument/completion", **_place(path, line, column))
        items = found if isinstance(found, list) else found["items"]
        return {item["label"]: item for item in items}

    def hover(self, path: Path, line: int, column: int) -> str:
        """Returns what the server says about a place (from 0)."""
        contents = self.request("textDocument/hover", **_place(path, line, column))["contents"]
        parts = contents if isinstance(contents, list) else [contents]
        return "\n".join(part if isinstance(part, str) else part["value"] for part in parts)

    def request(self, method: str, **params: Any) -> Any:
        """Returns the server's answer."""
        self._last_id += 1
        mine = self._last_id
        self._send({"id": mine, "method": method, "params": params})
        while True:
            message = self._take()
            if message.get("id") == mine and "method" not in message:
                assert "error" not in message, message
                return message["result"]

    def _notify(self, method: str, **params: Any) -> None:
        self._send({"method": method, "params": params})

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._server.stdin is not None
        self._server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._server.stdin.flush()

    def _take(self) -> dict[str, Any]:
        """Returns the next message, after answering it where the server asks and noting what it underlines."""
        message = self._received.get(timeout=TIMEOUT_S)
        method = message.get("method")
        if method == "textDocument/publishDiagnostics":
            self._diagnostics[message["params"]["uri"]] = message["params"]["diagnostics"]
        elif method == "workspace/configuration":
            sections = [self._settings.get(item.get("section")) for item in message["params"]["items"]]
            self._send({"id": message["id"], "result": sections})
        elif method is not None and "id" in message:
            self._send({"id": message["id"], "result": None})
        return message

    def _read(self) -> None:
        """Puts every message of the server into the queue, until it ends."""
        stream = self._server.stdout
        assert stream is not None
        size = 0
        while header := stream.readline():
            if header.lower().startswith(b"content-length"):
                size = int(header.partition(b":")[2])
            elif header == b"\r\n":
                self._received.put(json.loads(stream.read(size)))


def _place(path: Path, line: int, column: int) -> dict[str, Any]:
    return {"textDocument": {"uri": path.as_uri()}, "position": {"line": line, "character": column}}
