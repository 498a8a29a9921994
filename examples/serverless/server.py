"""A model server that knows next to nothing of woodfrog: weights on the GPU, one HTTP request at a time.

The "model" multiplies a matrix with a vector for each token, in whole numbers, so that an answer is right or wrong and
never nearly right. POST /generate {"prompt": "…", "tokens": 8} → {"text": "…", "tokens": [...]}; GET /health.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from cuda.bindings import driver

import woodfrog

ALPHABET = "abcdefghijklmnopqrstuvwxyz      "
MAX_BODY_BYTES = 1 << 16
MAX_TOKENS = 256
THREADS = 32
WORD = 4

# y = W x over whole numbers modulo 2**32, a thread a row.
PTX = b"""
.version 7.0
.target sm_52
.address_size 64
.visible .entry step(.param .u64 weights, .param .u64 state, .param .u64 out, .param .u32 size)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [weights];
    ld.param.u64 %rd2, [state];
    ld.param.u64 %rd3, [out];
    ld.param.u32 %r1, [size];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    cvta.to.global.u64 %rd3, %rd3;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    mul.lo.u32 %r6, %r5, %r1;
    mul.wide.u32 %rd4, %r6, 4;
    add.u64 %rd1, %rd1, %rd4;
    mov.u32 %r7, 0;
    mov.u32 %r8, 0;
next:
    ld.global.u32 %r9, [%rd1];
    ld.global.u32 %r10, [%rd2];
    mad.lo.u32 %r8, %r9, %r10, %r8;
    add.u64 %rd1, %rd1, 4;
    add.u64 %rd2, %rd2, 4;
    add.u32 %r7, %r7, 1;
    setp.lt.u32 %p2, %r7, %r1;
    @%p2 bra next;
    mul.wide.u32 %rd5, %r5, 4;
    add.u64 %rd3, %rd3, %rd5;
    st.global.u32 [%rd3], %r8;
done:
    ret;
}
"""


class Model:
    """`size`² weights in GPU memory, and `ballast_mib` more that are only there to be moved."""

    def __init__(self, size: int, ballast_mib: int) -> None:
        self.size = size
        checked(driver.cuInit(0))
        device = checked(driver.cuDeviceGet(0))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
        self._kernel = checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(PTX)), b"step"))
        self._weights = self._made(size * size, seed=1)
        self._state, self._out = (checked(driver.cuMemAlloc(size * WORD)) for _ in range(2))
        if ballast_mib:
            checked(driver.cuMemsetD32(checked(driver.cuMemAlloc(ballast_mib << 20)), 0x5EED, ballast_mib << 18))

    def _made(self, count: int, seed: int) -> Any:
        values, value = array.array("I"), seed
        for _ in range(count):  # xorshift32
            value ^= value << 13 & 0xFFFFFFFF
            value ^= value >> 17
            value ^= value << 5 & 0xFFFFFFFF
            values.append(value)
        address = checked(driver.cuMemAlloc(count * WORD))
        checked(driver.cuMemcpyHtoD(address, values.tobytes(), count * WORD))
        return address

    def generate(self, prompt: str, tokens: int) -> list[int]:
        """That many tokens after the prompt."""
        values = array.array("I", list((prompt.encode() + bytes(self.size))[: self.size]))
        found = []
        for _ in range(tokens):
            checked(driver.cuMemcpyHtoD(self._state, values.tobytes(), self.size * WORD))
            arguments = (
                (int(self._weights), int(self._state), int(self._out), self.size),
                (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
            )
            blocks = -(-self.size // THREADS)
            checked(driver.cuLaunchKernel(self._kernel, blocks, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0))
            result = bytearray(self.size * WORD)
            checked(driver.cuMemcpyDtoH(result, self._out, len(result)))
            out = array.array("I", bytes(result))
            found.append((sum(out) >> 7) % len(ALPHABET))
            values = array.array("I", ((value >> 5) ^ row for row, value in enumerate(out)))
        return found


def checked(answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        sys.exit(f"the driver answers {result.name}")
    return values[0] if values else None


class Handler(BaseHTTPRequestHandler):
    """`model` is set by main."""

    model: Model
    who = "original"

    def do_GET(self) -> None:
        self._answer(200, {"who": self.who})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        if not 0 < length <= MAX_BODY_BYTES:
            self._answer(413, {"error": "the body is too large, or there is none"})
            return
        try:
            body = json.loads(self.rfile.read(length))
            prompt, tokens = str(body["prompt"]), min(int(body.get("tokens", 8)), MAX_TOKENS)
        except (ValueError, KeyError, TypeError) as error:
            self._answer(400, {"error": f"not a request: {error}"})
            return
        found = self.model.generate(prompt, tokens)
        self._answer(200, {"text": "".join(ALPHABET[token] for token in found), "tokens": found, "who": self.who})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the front counts."""

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def restored(news: woodfrog.Restored) -> None:
    """The one place where this program knows that it may wake up as somebody else."""
    Handler.who = f"{news.name}{news.environment.get('GREETING', '')}"
    print(f"restored as {news.name}, ports {news.ports}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a small model.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--size", type=int, default=64, help="the model has this many weights, squared")
    parser.add_argument("--ballast-mib", type=int, default=0, help="more GPU memory, to see it moved")
    options = parser.parse_args()
    Handler.model = Model(options.size, options.ballast_mib)
    woodfrog.on_restore(restored)
    with HTTPServer(("127.0.0.1", options.port), Handler) as server:
        print(f"serving on port {server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
