"""The files of the console: read once, told apart by their content, and the same for everybody."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from nerite.transports.http.head import RequestHead
from nerite.transports.http.reply import Reply

_FOLDER: Final = Path(__file__).with_name("page")
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What is not in here, such as a licence, is for those who read the folder."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""The page's Content-Security-Policy: its own scripts, its own server, and no text that becomes a script."""
_HEADERS: Final = (
    f"Content-Security-Policy: {_POLICY}\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    # Kept, and asked for each time whether it is still the same: an upgrade is seen at once.
    "Cache-Control: no-cache\r\n"
)


class File:
    """A file of the page."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self._tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = f"{_HEADERS}ETag: {self._tag}\r\n".encode()
        self._whole = Reply(200, content, _TYPES[path.suffix], headers)
        self._same = Reply(304, headers=headers)

    def reply(self, head: RequestHead) -> Reply:
        """Return the file, or that the client has it already."""
        return self._same if self._tag in head.headers.get("if-none-match", "") else self._whole


def read() -> dict[str, File]:
    """Return all files by their names."""
    return {path.name: File(path) for path in sorted(_FOLDER.rglob("*")) if path.suffix in _TYPES}
