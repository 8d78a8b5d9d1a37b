"""A local server that speaks as much of the Hugging Face Hub's protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository, and how it behaves."""

    url: str
    repository: str
    files: Mapping[str, Path]
    token: str | None = None  # required of every request, if set
    gated: bool = False
    break_after: int | None = None  # bytes after which the next large answer is cut off
    ranges: list[str] = field(default_factory=list)  # Range headers of resumed requests
    sent: dict[str, int] = field(default_factory=dict)


@contextmanager
def serving(repository: str, files: Mapping[str, Path]) -> Iterator[Hub]:
    """The hub, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", repository, files)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _answer(self, *, body: bool) -> None:
        hub = self.hub
        path = self.path.partition("?")[0].strip("/")
        if hub.gated:
            self._refuse(403, "GatedRepo")
        elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "RepoNotFound")
        elif path.startswith(f"api/models/{hub.repository}/tree/"):
            self._send_json(self._tree())
        elif path.startswith(f"api/models/{hub.repository}"):
            self._send_json(self._about())
        elif path.startswith(f"{hub.repository}/resolve/") and path.split("/", 4)[-1] in hub.files:
            self._send_file(path.split("/", 4)[-1], body=body)
        else:
            self._refuse(404, "RepoNotFound")

    def _about(self) -> dict[str, object]:
        siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in self.hub.files.items()]
        card = {"license": "apache-2.0"}
        return {"id": self.hub.repository, "modelId": self.hub.repository, "sha": REVISION, "private": False,
                "siblings": siblings, "cardData": card, "tags": [], "downloads": 0, "likes": 0}  # fmt: skip

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": hashlib.sha1(name.encode()).hexdigest()}
            for name, file in self.hub.files.items()
        ]

    def _send_json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_file(self, name: str, *, body: bool) -> None:
        hub, data = self.hub, self.hub.files[name].read_bytes()
        wanted = self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted.startswith("bytes=") else 0
        if start:
            hub.ranges.append(wanted)
        part = data[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        if hub.break_after is not None and len(part) > hub.break_after:
            part, hub.break_after = part[: hub.break_after], None
            self.close_connection = True
        hub.sent[name] = hub.sent.get(name, 0) + len(part)
        self.wfile.write(part)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
