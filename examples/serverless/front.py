"""An HTTP front that scales a model server from zero with woodfrog.

    python examples/serverless/front.py
    curl -d '{"prompt": "frog"}' http://127.0.0.1:8080/generate

At its first start it runs the server once, freezes it into an image when it is ready, and from then on every instance
is that image. /metrics has the latencies as a Prometheus histogram, /table for people, /instances what runs now.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fleet import Fleet, Limits
from histogram import Latencies

import woodfrog
from woodfrog._native import paths
from woodfrog.doctor import machine

log = logging.getLogger("front")

NAME = "serverless-model"
SERVER = Path(__file__).resolve().with_name("server.py")
START_S = 120.0  # for the server's first start
MAX_BODY_BYTES = 1 << 16


class Front(BaseHTTPRequestHandler):
    """`fleet` and `latencies` are set by main."""

    fleet: Fleet
    latencies: Latencies

    def do_GET(self) -> None:
        pages: dict[str, Callable[[], str]] = {
            "/metrics": lambda: self.latencies.prometheus() + _gauges(self.fleet),
            "/table": self.latencies.table,
            "/instances": lambda: json.dumps(self.fleet.states()) + "\n",
        }
        page = pages.get(self.path)
        self._answer(200 if page else 404, page().encode() if page else b"no such page\n", "text/plain")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        if length > MAX_BODY_BYTES:
            self._answer(413, b"too large\n", "text/plain")
            return
        body, begun = self.rfile.read(length), time.monotonic()
        try:
            with self.fleet.lease() as (instance, start):
                status, answer = _ask(instance.port, self.path, body)
        except (OSError, http.client.HTTPException, woodfrog.WoodfrogError) as failure:
            self._answer(503, f"{failure}\n".encode(), "text/plain")
            return
        self.latencies.add(start, time.monotonic() - begun)
        self._answer(status, answer, "application/json", {"X-Woodfrog-Start": start})

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: /metrics counts."""

    def _answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _ask(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """A connection for each request: one that stayed open would be in the way of a checkpoint."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body, {"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _gauges(fleet: Fleet) -> str:
    lines = ["# HELP serverless_instances Instances by state.", "# TYPE serverless_instances gauge"]
    lines += [f'serverless_instances{{state="{state}"}} {count}' for state, count in fleet.states().items()]
    return "\n".join(lines) + "\n"


def make_image(port: int, options: list[str]) -> str:
    """Run the server until it is ready, and freeze it there."""
    log.info("the server's first and only start, to be frozen")
    target = woodfrog.run([sys.executable, str(SERVER), "--port", str(port), *options], name=NAME)
    deadline = time.monotonic() + START_S
    while not _is_ready(port):
        if not target.poll() or time.monotonic() > deadline:
            target.kill()
            sys.exit(f"the server does not come up; see {target.log}")
        time.sleep(0.05)  # an HTTP server can be asked for its readiness only
    made = woodfrog.checkpoint(target, stop=True)
    target.wait(START_S)
    assert made.image is not None
    return made.image


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health", headers={"Connection": "close"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Scale a model server from zero.")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--server-port", type=int, default=8000, help="that the image has; instances have others")
    parser.add_argument("--image", help="instead of making one")
    parser.add_argument("--max", type=int, default=4, help="instances at once")
    parser.add_argument("--standby", type=int, default=1, help="processes that wait restored")
    parser.add_argument("--suspend-after", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--end-after", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--ballast-mib", default="0", help="GPU memory of the server that is only there to be moved")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if not machine.has_real_gpu():
        log.info("no GPU here: the simulated one")
        os.environ["LD_LIBRARY_PATH"] = str(paths.simgpu_dir())
    image = options.image or make_image(options.server_port, ["--ballast-mib", options.ballast_mib])
    limits = Limits(options.max, options.standby, options.suspend_after, options.end_after)
    Front.fleet, Front.latencies = Fleet(image, options.server_port, limits), Latencies()
    with ThreadingHTTPServer(("127.0.0.1", options.port), Front) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        print(f"front on port {server.server_address[1]}, image {image}", flush=True)
        server.serve_forever()
    Front.fleet.close()
    print(Front.latencies.table(), end="", flush=True)


if __name__ == "__main__":
    main()
