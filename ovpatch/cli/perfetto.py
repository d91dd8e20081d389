"""A trace in the user's browser, by Perfetto's page, which fetches it from this machine.

The page is https://ui.perfetto.dev. It computes in the browser, and its own security policy lets it read from
``127.0.0.1:9001`` and from no other local address.
"""

from __future__ import annotations

import time
import webbrowser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Final

PAGE: Final = "https://ui.perfetto.dev"
PORT: Final = 9001
_PATIENCE_S: Final = 60.0


class _Handler(BaseHTTPRequestHandler):
    """Answers the page's request for the one file, and no other."""

    server: _Server

    def do_GET(self) -> None:
        """Send the trace."""
        if self.path != f"/{self.server.trace.name}":
            self.send_error(404)
            return
        data = self.server.trace.read_bytes()
        self._begin(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.server.fetched = True

    def do_OPTIONS(self) -> None:
        """Allow the page to ask: a browser wants to know before a public page reads from this machine."""
        self._begin(204)
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.end_headers()

    def _begin(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Access-Control-Allow-Origin", PAGE)
        self.send_header("Cache-Control", "no-cache")

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing to stderr."""


class _Server(HTTPServer):
    """Serves one file on this machine until it was fetched."""

    def __init__(self, trace: Path) -> None:
        self.trace, self.fetched = trace, False
        super().__init__(("127.0.0.1", PORT), _Handler)


def show(trace: Path) -> str:
    """Open a trace in the user's browser; return what to tell the user.

    Args:
        trace: A file that Perfetto reads; it is served to its page on this machine, for at most a minute.
    """
    by_hand = f"open {trace} at {PAGE} by hand"
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return f"there is no browser here; {by_hand}"
    try:
        server = _Server(trace)
    except OSError as error:
        return f"port {PORT}, from which Perfetto reads, cannot be used ({error.strerror}); {by_hand}"
    with server:
        browser.open(f"{PAGE}/#!/?url=http://127.0.0.1:{server.server_port}/{trace.name}")
        end = time.monotonic() + _PATIENCE_S
        while not server.fetched and (left := end - time.monotonic()) > 0:
            server.timeout = left
            server.handle_request()
    return f"shown at {PAGE}" if server.fetched else f"the browser did not fetch the trace; {by_hand}"
