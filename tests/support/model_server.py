"""The example's model server (examples/serverless/server.py) as a target."""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

from product import DEADLINE_S, ROOT, Product, Stepper

from woodfrog import launch
from woodfrog._native import paths

PROGRAM = ROOT / "examples" / "serverless" / "server.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(product: Product, name: str = "model") -> tuple[Stepper, int]:
    """The server, once it serves, and its port."""
    port, log = free_port(), product.root / f"{name}.log"
    environment = launch.target_environment(
        name, product.runtime, {**os.environ, **product.environment}, paths.interposer()
    )
    command = [sys.executable, str(PROGRAM), "--port", str(port)]
    process = launch.start(command, name=name, log=log, env=environment, cwd=str(product.root))
    target = Stepper(process.pid, log, process)
    product._targets.append(target)
    target.wait_for(lambda lines: f"serving on port {port}" in lines, "server")
    return target, port


def generate(port: int, prompt: str) -> dict[str, Any]:
    """One request, its answer."""
    data = json.dumps({"prompt": prompt, "tokens": 6}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", data=data)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return dict(json.loads(answer.read()))


def who(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=DEADLINE_S) as answer:
        return str(json.loads(answer.read())["who"])


def log_of(result: dict[str, Any]) -> Path:
    return Path(str(result["log"]))
