"""The demo's program: trains a small network with its own CUDA kernels. It knows nothing of woodfrog.

Prints a line a step, and at the end writes weights and the whole way to them into a file, in one rename. Deterministic
to the last bit. Slow for a while in the middle if asked to, so that whoever wants to freeze it there has the time.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SAMPLES, HIDDEN = 96, 24
PARAMETERS = 4 * HIDDEN + 1
THREADS = 32
FLOAT = 4


def main() -> None:
    options = _options()
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    kernel = _compile(device)

    def run(name: str, count: int, *arguments: Any) -> None:
        launch(stream, LaunchConfig(grid=-(-count // THREADS), block=min(count, THREADS)), kernel(name), *arguments)

    inputs, wanted = _allocate(2 * SAMPLES), _allocate(SAMPLES)
    parameters, first, second, gradient = (_allocate(PARAMETERS) for _ in range(4))
    hidden, error, report = _allocate(SAMPLES * HIDDEN), _allocate(SAMPLES), _allocate(2)
    trajectory = _allocate(max(options.steps * PARAMETERS, options.state_mib << 18))
    run("make_data", SAMPLES, inputs, wanted)
    run("make_parameters", PARAMETERS, parameters, first, second)
    for step in range(1, options.steps + 1):
        run("forward", SAMPLES, parameters, inputs, wanted, hidden, error)
        run("backward", PARAMETERS, parameters, inputs, hidden, error, gradient)
        corrections = (ctypes.c_float(1 / (1 - 0.9**step)), ctypes.c_float(1 / (1 - 0.999**step)))
        run("adam", PARAMETERS, parameters, first, second, gradient, trajectory, *corrections)
        run("finish_step", 1, error, report)
        stream.sync()
        loss, done = struct.unpack("<2f", _read(report, 2 * FLOAT))
        if int(done) != step:
            sys.exit(f"the GPU has counted {int(done)} steps where {step} were made")
        print(f"step {step} loss {loss:.6f}", flush=True)
        if options.slow_from <= step < options.slow_to:
            time.sleep(options.pace_ms / 1000)
    result = _read(parameters, PARAMETERS * FLOAT) + _read(trajectory, options.steps * PARAMETERS * FLOAT)
    temporary = options.out.with_suffix(".tmp")
    temporary.write_bytes(result)
    temporary.rename(options.out)
    print(f"wrote {len(result)} bytes of weights", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on the GPU.")
    parser.add_argument("--out", type=Path, required=True, help="file for the final weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--slow-from", type=int, default=0, help="first step after which it pauses")
    parser.add_argument("--slow-to", type=int, default=0, help="first step after which it pauses no more")
    parser.add_argument("--pace-ms", type=float, default=0.0, help="length of the pause")
    parser.add_argument("--state-mib", type=int, default=32, help="GPU memory to hold at least")
    return parser.parse_args()


def _compile(device: Device) -> Any:
    """The kernels by name, as PTX for the device's own architecture, which every driver can take."""
    source = Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
    capability = device.compute_capability
    options = ProgramOptions(
        arch=f"compute_{capability.major}{capability.minor}",
        define_macro=[("SAMPLES", str(SAMPLES)), ("HIDDEN", str(HIDDEN)), ("PARAMETERS", str(PARAMETERS))],
        fma=False,
    )
    module = Program(source, "c++", options).compile("ptx")
    kernels: dict[str, Any] = {}

    def kernel(name: str) -> Any:
        if name not in kernels:
            kernels[name] = module.get_kernel(name)
        return kernels[name]

    return kernel


def _allocate(floats: int) -> int:
    """Address of GPU memory for so many floats, zeroed; freed by the end of the process."""
    address = _checked(driver.cuMemAlloc(floats * FLOAT))
    _checked(driver.cuMemsetD8(address, 0, floats * FLOAT))
    return int(address)


def _read(address: int, size_bytes: int) -> bytes:
    found = bytearray(size_bytes)
    _checked(driver.cuMemcpyDtoH(found, driver.CUdeviceptr(address), size_bytes))
    return bytes(found)


def _checked(answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        sys.exit(f"the driver answers {result.name}")
    return values[0] if values else None


if __name__ == "__main__":
    main()
