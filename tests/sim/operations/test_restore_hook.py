"""In what a restored process may differ from its image: ports, environment, files; and the hook that runs before it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from instances import nothing_is_left
from model_server import free_port, generate, log_of, start, who
from product import DEADLINE_S, Product, Stepper

from woodfrog.errors import NoDaemonError, NotFoundError, RefusedError, TimeoutExceededError, UsageError, WoodfrogError
from woodfrog.target.identity import ProcessHandle

PROMPTS = ("frog", "winter", "a pond under ice")


def image_of_server(product: Product) -> tuple[str, int, list[list[int]]]:
    """The image of a server, the port that it had, and its answers."""
    target, port = start(product)
    answers = [generate(port, prompt)["tokens"] for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return str(product.checkpoint(target, stop=True)["image"]), port, answers


def restore(product: Product, image: str, **params: Any) -> dict[str, Any]:
    result: dict[str, Any] = product.call("restore", image=image, store=str(product.store_path), **params)
    product.restored(result, log_of(result))
    return result


def end(pid: int) -> None:
    with contextlib.suppress(NotFoundError), ProcessHandle(pid) as handle:
        assert handle.kill(DEADLINE_S)


def test_servers_of_one_image_serve_on_ports_of_their_own_and_know_who_they_are(product: Product) -> None:
    image, port, answers = image_of_server(product)
    results = [
        restore(product, image, new_pid_namespace=True, ports={port: 0}, environment={"GREETING": f"-{number}"})
        for number in range(3)
    ]
    ports = [result["ports"][str(port)] for result in results]
    assert len({port, *ports}) == 4
    for number, (result, own) in enumerate(zip(results, ports, strict=True)):
        Stepper(0, log_of(result)).wait_for(
            lambda lines, result=result: any(line.startswith(f"restored as {result['name']},") for line in lines),
            "news",
        )
        assert [generate(own, prompt)["tokens"] for prompt in PROMPTS] == answers
        assert who(own) == f"{result['name']}-{number}"
    end(results[1]["root_pid"])
    assert [generate(ports[2], prompt)["tokens"] for prompt in PROMPTS] == answers
    with pytest.raises(WoodfrogError, match="port"):  # the third has it
        restore(product, image, new_pid_namespace=True, ports={port: ports[2]}, standby=False)
    assert len(product.call("ps")) == 2
    [waiting] = product.call("standby", image=image, store=str(product.store_path), new_pid_namespace=True,
                             ports={port: 0})  # fmt: skip
    taken = restore(product, image, new_pid_namespace=True, ports={port: 0}, environment={"GREETING": "!"})
    assert (taken["standby"], taken["ports"]) == ("host", waiting["ports"])
    own = taken["ports"][str(port)]
    assert [generate(own, prompt)["tokens"] for prompt in PROMPTS] == answers
    Stepper(0, log_of(taken)).wait_for(lambda lines: any("restored as" in line for line in lines), "news")
    assert who(own) == f"{taken['name']}!"


def test_what_cannot_be_changed_is_refused_before_anything_is_there(product: Product, tmp_path: Path) -> None:
    image, port, answers = image_of_server(product)
    with pytest.raises(RefusedError, match=f"does not listen on TCP port 1;.*{port}"):
        restore(product, image, ports={1: 2})
    for wrong in (
        {"ports": {port: 70000}},
        {"ports": {"frog": 1}},
        {"binds": [["/tmp", "/mnt"]]},
        {"environment": {"A=B": "C"}},
        {"hook": "true", "hook_timeout_s": 0},
    ):
        with pytest.raises(UsageError):
            restore(product, image, **wrong)
    with pytest.raises(RefusedError, match="does not exist"):
        restore(product, image, new_pid_namespace=True, binds=[[str(tmp_path / "nowhere"), "/tmp"]])
    with pytest.raises(UsageError, match="one port"):
        product.call("standby", image=image, store=str(product.store_path), count=2, ports={port: free_port()})
    # Without a namespace the port can change as well.
    own = free_port()
    result = restore(product, image, ports={port: own})
    assert result["instance"] == ""
    assert generate(own, PROMPTS[0])["tokens"] == answers[0]
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


def test_a_folder_of_its_own_lies_over_one_of_the_machine(product: Product, tmp_path: Path) -> None:
    target = product.run(name="llama")
    image = product.checkpoint(target, stop=True)["image"]
    here, there = product.root / "here", product.root / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    result = restore(product, image, new_pid_namespace=True, binds=[[str(here), str(there)]])
    assert Path(f"/proc/{result['pid']}/root{there}/name").read_text() == "here"
    assert (there / "name").read_text() == "there"
    again = product.call("checkpoint", target=result["pid"], store=str(product.store_path))
    assert again["image"]
    product.restored(result, log_of(result)).check_runs_right()


def test_the_hook_runs_before_the_target_goes_on_and_knows_it(product: Product) -> None:
    target = product.run(name="llama")
    image = product.checkpoint(target, stop=True)["image"]
    seen = product.root / "seen"
    standing = target.steps()
    hook = f'env | grep ^WOODFROG_ > {seen}; readlink /proc/$WOODFROG_PID/cwd >> {seen}; echo "$COLOUR" >> {seen}'
    result = restore(product, image, new_pid_namespace=True, hook=hook, environment={"COLOUR": "green"})
    lines = seen.read_text().splitlines()
    assert lines[-2:] == [str(product.root), "green"]
    told = dict(line.split("=", 1) for line in lines[:-2])
    assert told == {
        "WOODFROG_OPERATION": "restore",
        "WOODFROG_PID": str(result["pid"]),
        "WOODFROG_ROOT_PID": str(result["root_pid"]),
        "WOODFROG_NAME": "llama",
        "WOODFROG_IMAGE": image,
        "WOODFROG_INSTANCE": result["instance"],
        "WOODFROG_DIRECTORY": str(product.root),
        "WOODFROG_LOG": str(target.log),
        "WOODFROG_PORTS": "",
    }
    assert "hook" in result["phases"]
    running = product.restored(result, log_of(result))
    running.wait_steps(2)
    assert running.steps() > standing
    running.check_runs_right()


@pytest.mark.parametrize("namespace", [False, True])
def test_a_hook_that_fails_or_hangs_leaves_nothing_of_the_target(product: Product, namespace: bool) -> None:
    target = product.run(name="llama")
    image = product.checkpoint(target, stop=True)["image"]
    with pytest.raises(WoodfrogError, match="status 3: no room on the pond") as failed:
        restore(product, image, new_pid_namespace=namespace, hook="echo no room on the pond; exit 3")
    assert (failed.value.phase, failed.value.target_state) == ("hook", "none")
    child = product.root / "child"
    with pytest.raises(TimeoutExceededError, match="hook"):
        restore(
            product, image, new_pid_namespace=namespace, hook=f"sleep 600 & echo $! > {child}; wait", hook_timeout_s=1
        )
    assert not Path(f"/proc/{child.read_text().strip()}").exists()
    nothing_is_left(product)
    product.call("standby", image=image, store=str(product.store_path), new_pid_namespace=namespace)
    with pytest.raises(WoodfrogError, match="status 1") as failed:
        restore(product, image, new_pid_namespace=namespace, hook="exit 1")
    assert failed.value.target_state == "standby"
    result = restore(product, image, new_pid_namespace=namespace, hook="exit 0")
    assert result["standby"] == "host"
    product.restored(result, log_of(result)).check_runs_right()


@pytest.mark.parametrize("action", ["error", "kill"])
@pytest.mark.parametrize("phase", ["cpu", "control", "hook", "commit"])
def test_a_failure_anywhere_leaves_no_namespace_behind(
    make_product: Callable[..., Product], tmp_path: Path, phase: str, action: str
) -> None:
    faults = [f"restore.{phase}.{side}:{action}" for side in ("before", "after")]
    (tmp_path / "fired").mkdir()
    product = make_product(
        environment={"WOODFROG_FAULTS": ",".join(faults), "WOODFROG_FAULTS_STATE": str(tmp_path / "fired")}
    )
    target = product.run(name="llama")
    image = product.checkpoint(target, stop=True)["image"]
    for _ in range(3):
        daemon = product.daemon_pid()
        try:
            result = restore(product, image, new_pid_namespace=True, hook="true")
            break
        except NoDaemonError:
            product.wait_for_new_daemon(daemon)
        except WoodfrogError:
            if action != "error":
                raise
        rows = product.call("ps")
        if not rows:
            nothing_is_left(product)
            continue
        # Beyond its commit point, or so near to it that it runs: it is kept, as a whole.
        [row] = rows
        result = {**row, "log": row["log"]}
        break
    running = product.restored(result, log_of(result))
    running.check_runs_right()
    end(running.pid)
    nothing_is_left(product)
