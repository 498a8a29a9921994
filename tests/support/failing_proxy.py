"""An HTTP proxy before a real server that makes chosen requests fail, as a network or an overloaded server would."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Judge = Callable[[str, str], "int | str | None"]
"""Of (method, path with query): a status to answer with instead of asking the server, "lost" to drop the server's
answer after it was given, or None to pass it on."""


class FailingProxy:
    """Serves until `close`. `judge` may be replaced at any time."""

    def __init__(self, endpoint: str) -> None:
        self.judge: Judge = lambda method, path: None
        self.seen: list[tuple[str, str]] = []
        self.passed: list[tuple[str, str, int]] = []  # answered by the server; the body's bytes
        server = endpoint.removeprefix("http://")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.seen.append((self.command, self.path))
                verdict = proxy.judge(self.command, self.path)
                if isinstance(verdict, int):
                    self.answer(verdict, [], b"<Error><Code>Injected</Code></Error>")
                    return
                connection = http.client.HTTPConnection(server, timeout=120)
                try:
                    # Headers as they came: Host is signed.
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    answer = connection.getresponse()
                    content = answer.read()
                    proxy.passed.append((self.command, self.path, len(body)))
                    if verdict == "lost":
                        self.close_connection = True
                        return
                    headers = [
                        (name, value)
                        for name, value in answer.getheaders()
                        if name.lower() not in ("content-length", "transfer-encoding", "connection")
                    ]
                    length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                    self.answer(answer.status, headers, content, length)
                finally:
                    connection.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def answer(
                self, status: int, headers: list[tuple[str, str]], content: bytes, length: str | None = None
            ) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """The test reads `seen`."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Times:
    """A judge that answers the first requests that match with these verdicts, and passes everything else."""

    def __init__(self, method: str, part: str, verdicts: list[int | str]) -> None:
        self._method = method
        self._part = part
        self._verdicts = list(verdicts)
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> int | str | None:
        with self._lock:
            if method == self._method and self._part in path and self._verdicts:
                return self._verdicts.pop(0)
            return None

    @property
    def left(self) -> int:
        return len(self._verdicts)
