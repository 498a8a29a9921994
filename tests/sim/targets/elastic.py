"""Target: a job with its launcher, made of what torchrun's agent and PyTorch's ranks have beside the GPU.

    elastic.py RANKS

The launcher looks at what GPUs there are (it calls cuInit and never has a context), would like an io_uring and does
without, has a store on 127.0.0.1 that ranks add up through and that it is a client of itself, one thread that serves it
by epoll, one that beats against it, and one for each rank's output, which comes through a pipe. Ranks lead sessions of
their own. It looks every 50 ms whether one has ended (never waiting for it), and starts all of them again when one
failed. At each step a rank checks its GPU memory and writes what follows from the sum of all ranks' and the step.

    ready RANKS io_uring ERRNO     the launcher, about to start ranks
    round N pid PID…               the ranks have been started for the Nth time
    rank K step N errors E         from each rank; the launcher writes `step N errors E` when all have said it
    done N errors E                at SIGTERM: all ranks have ended with success
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from typing import IO

SIZE = 256 << 10  # bytes of GPU memory of a rank
SYS_IO_URING_SETUP = 425
POST = struct.Struct("<qqQ")  # round (-1: a beat), step, value
TOTAL = struct.Struct("<Q?")  # sum of the step, whether it is the last one


def driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    assert library.cuInit(0) == 0
    return library


def io_uring() -> int:
    """0 if there is one, kept open; else why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    return 0 if libc.syscall(SYS_IO_URING_SETUP, 4, (ctypes.c_uint32 * 30)()) >= 0 else ctypes.get_errno()


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write: whole lines, also of several threads


def exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise SystemExit("the store has ended")
        found += more
    return found


class Store:
    """Adds up what the ranks of a round post for a step, and tells each of them. A thread of its own serves it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._posts: dict[tuple[int, int], list[tuple[socket.socket, int]]] = {}
        self.last = False  # the next complete step is the last one
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wake:
                    return
                if key.fileobj is self._listener:
                    self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                else:
                    self._take(key.fileobj)  # type: ignore[arg-type]

    def _take(self, client: socket.socket) -> None:
        try:
            post = client.recv(POST.size, socket.MSG_WAITALL)
        except OSError:
            post = b""
        if len(post) < POST.size:
            self._selector.unregister(client)
            client.close()
            return
        number, step, value = POST.unpack(post)
        if number < 0:
            client.sendall(TOTAL.pack(0, False))
            return
        posts = self._posts.setdefault((number, step), [])
        posts.append((client, value))
        if len(posts) == self._ranks:
            total, last = sum(value for _, value in posts) % 2**64, self.last
            for one, _ in posts:
                with contextlib.suppress(OSError):  # of a rank that posted and was killed: closed here or there
                    one.sendall(TOTAL.pack(total, last))
            del self._posts[number, step]


class Gpu:
    """Two allocations on the primary context of one GPU."""

    def __init__(self) -> None:
        self._cuda = driver()
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self.memory = [ctypes.c_uint64(), ctypes.c_uint64()]
        for one in self.memory:
            self._call("cuMemAlloc_v2", ctypes.byref(one), ctypes.c_size_t(SIZE))

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            raise SystemExit(f"{name}: {result}")

    def read(self) -> bytes:
        found = ctypes.create_string_buffer(SIZE)
        self._call("cuMemcpyDtoH_v2", found, self.memory[0], ctypes.c_size_t(SIZE))
        return found.raw

    def write(self, data: bytes) -> None:
        """Through the other allocation."""
        self._call("cuMemcpyHtoD_v2", self.memory[1], data, ctypes.c_size_t(SIZE))
        self._call("cuMemcpyDtoD_v2", self.memory[0], self.memory[1], ctypes.c_size_t(SIZE))


def rank() -> None:
    number, this, port = (int(os.environ[name]) for name in ("ROUND", "RANK", "STORE_PORT"))
    store = socket.create_connection(("127.0.0.1", port))
    gpu, step, wrong, last = Gpu(), 0, 0, False
    expected = random.Random(this).randbytes(SIZE)
    gpu.write(expected)
    while not last:
        step += 1
        found = gpu.read()
        wrong += found != expected
        store.sendall(POST.pack(number, step, zlib.crc32(found)))
        total, last = TOTAL.unpack(exactly(store, TOTAL.size))
        expected = random.Random(f"{total} {step} {this}").randbytes(SIZE)
        gpu.write(expected)
        say(f"step {step} errors {wrong}")


class Launcher:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._store = Store(ranks)
        self._ending = threading.Event()
        self._said: dict[tuple[int, int], list[int]] = {}
        self._steps = self._wrong = 0
        self._lock = threading.Lock()
        self._round = 0
        signal.signal(signal.SIGTERM, self._end)
        threading.Thread(target=self._beat, daemon=True).start()

    def run(self) -> None:
        while not self._round_ended():
            pass
        say(f"done {self._steps} errors {self._wrong}")
        self._store.close()

    def _end(self, *_: object) -> None:
        self._store.last = True

    def _beat(self) -> None:
        connection = socket.create_connection(("127.0.0.1", self._store.port))
        while not self._ending.wait(0.05):
            connection.sendall(POST.pack(-1, 0, 0))
            exactly(connection, TOTAL.size)

    def _round_ended(self) -> bool:
        """One round of ranks, whether they have ended with success; none is left."""
        self._round += 1
        processes, readers = [], []
        for this in range(self._ranks):
            environment = {"ROUND": str(self._round), "RANK": str(this), "STORE_PORT": str(self._store.port)}
            process = subprocess.Popen(
                [sys.executable, __file__], env={**os.environ, **environment}, stdout=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
            assert process.stdout is not None
            reader = threading.Thread(target=self._follow, args=(self._round, this, process.stdout))
            reader.start()
            processes.append(process)
            readers.append(reader)
        say(f"round {self._round} pid {' '.join(str(process.pid) for process in processes)}")
        looks = threading.Event()
        while True:
            looks.wait(0.05)
            codes = [process.poll() for process in processes]
            if any(codes) or all(code == 0 for code in codes):
                break
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in readers:
            reader.join()
        return not any(codes)

    def _follow(self, number: int, this: int, output: IO[bytes]) -> None:
        with output:
            for line in output:
                say(f"rank {this} {line.decode().rstrip()}")
                _, step, _, wrong = line.split()
                with self._lock:
                    said = self._said.setdefault((number, int(step)), [])
                    said.append(int(wrong))
                    if len(said) == self._ranks:
                        self._steps, self._wrong = self._steps + 1, max(self._wrong, *said)
                        say(f"step {self._steps} errors {max(said)}")


def main() -> None:
    if "RANK" in os.environ:
        rank()
        return
    ranks = int(sys.argv[1])
    library = driver()
    refused = io_uring()
    say(f"ready {ranks} io_uring {errno.errorcode[refused] if refused else 'here'}")
    Launcher(ranks).run()
    del library


if __name__ == "__main__":
    main()
