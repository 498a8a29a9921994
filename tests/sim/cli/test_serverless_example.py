"""examples/serverless for real: the front scales a model server up, to sleep, to nothing; every answer is right."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from model_server import free_port, generate, start
from product import DEADLINE_S, ROOT, Product

FRONT = ROOT / "examples" / "serverless" / "front.py"
PROMPTS = [f"frog {number}" for number in range(6)]


@contextlib.contextmanager
def front(product: Product, *options: str) -> Iterator[int]:
    """The front, once it serves: its port. It ends by itself when it is asked to."""
    port, log = free_port(), product.root / "front.log"
    command = [sys.executable, str(FRONT), "--port", str(port), "--server-port", str(free_port()), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **product.environment}, stdout=output, stderr=output, cwd=product.root
        )
    try:
        wait_for(lambda: f"front on port {port}" in log.read_text() or process.poll() is not None, "front", 180)
        assert process.poll() is None, log.read_text()
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """For what only a page of the front can tell."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {deadline_s} s"
        time.sleep(0.1)


def page(port: int, name: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def states(port: int) -> dict[str, int]:
    return dict(json.loads(page(port, "instances")))


def test_the_front_scales_from_zero_and_back_and_answers_as_a_server_never_frozen(product: Product) -> None:
    reference, reference_port = start(product, "reference")
    wanted = {prompt: generate(reference_port, prompt)["tokens"] for prompt in PROMPTS}
    assert reference.process is not None
    reference.process.kill()
    reference.process.wait(DEADLINE_S)
    with front(product, "--standby", "1", "--max", "3", "--suspend-after", "2", "--end-after", "20") as port:
        wait_for(lambda: states(port)["standby"] == 1, "standby process")
        assert states(port) == {"ready": 0, "busy": 0, "suspended": 0, "standby": 1}
        first = generate(port, PROMPTS[0])
        assert first["tokens"] == wanted[PROMPTS[0]]
        assert first["who"] == "serverless-model"
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda prompt: (prompt, generate(port, prompt)), PROMPTS * 3))
        assert all(answer["tokens"] == wanted[prompt] for prompt, answer in answers)
        assert 1 <= len({answer["who"] for _, answer in answers}) <= 3
        wait_for(lambda: states(port)["suspended"] > 0 and states(port)["ready"] == 0, "rest")
        assert generate(port, PROMPTS[1])["tokens"] == wanted[PROMPTS[1]]
        metrics, table = page(port, "metrics"), page(port, "table")
        assert 'serverless_request_seconds_count{start="standby"}' in metrics
        assert 'serverless_request_seconds_count{start="resume"}' in metrics
        assert "resume" in table
        assert sum(int(line.split()[1]) for line in table.splitlines()[1:]) == 20
        wait_for(lambda: states(port) == {"ready": 0, "busy": 0, "suspended": 0, "standby": 1}, "zero", 90)
        assert generate(port, PROMPTS[2])["tokens"] == wanted[PROMPTS[2]]
    assert product.call("ps") == []
    assert product.gpu_free_bytes() == product.gpu_total_bytes()


def test_a_front_whose_server_dies_says_so_and_goes_on(product: Product) -> None:
    with front(product, "--standby", "0", "--max", "1") as port:
        first = generate(port, PROMPTS[0])
        [row] = product.call("ps")
        os.kill(row["pid"], signal.SIGKILL)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            generate(port, PROMPTS[0])
        assert generate(port, PROMPTS[0])["tokens"] == first["tokens"]
