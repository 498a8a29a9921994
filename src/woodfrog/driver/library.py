"""Loads the driver through cuda-bindings, on first use, and turns its result codes into errors with fields.

`cuInit` costs one to three seconds the first time a process calls it, so it is called once, here, in the process that
stays (the daemon). Must never create a context: the daemon's belong to the transfer engine.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from woodfrog.errors import RefusedError, TargetState, WoodfrogError

_lock = threading.Lock()
_bindings: Any = None


class DriverError(WoodfrogError):
    """A driver call failed. `result` is its CUresult by name (e.g. CUDA_ERROR_ILLEGAL_STATE), `call` the function."""

    def __init__(self, reason: str, *, result: str = "", call: str = "", code: int = 0, **fields: Any) -> None:
        details = {"result": result, "call": call, "code": code, **(fields.pop("details", None) or {})}
        super().__init__(reason, details=details, **fields)
        self.result = result
        self.call = call
        self.code = code


class NoDriverError(RefusedError):
    """There is no usable CUDA driver on this machine."""


def bindings() -> Any:
    """The cuda.bindings.driver module with the driver initialised; NoDriverError when that cannot be."""
    global _bindings
    with _lock:
        if _bindings is None:
            _bindings = _load()
        return _bindings


def call(name: str, *arguments: Any, pid: int | None = None) -> Any:
    """Call a driver function by name; what it returns besides the result code (None, a value, or a tuple).

    DriverError when it fails, or when the driver does not have it.
    """
    module = bindings()
    function = getattr(module, name, None)
    if function is None:
        raise DriverError(f"This version of cuda-bindings does not know {name}.", call=name, pid=pid)
    try:
        result, *values = function(*arguments)
    except RuntimeError as error:  # what cuda-bindings raises for a function that the driver does not export
        raise DriverError(
            f"The driver does not have {name} ({error}).",
            call=name,
            pid=pid,
            advice="woodfrog needs driver 570 or newer; `woodfrog doctor` says what this one has.",
        ) from error
    if int(result) != 0:
        raise DriverError(
            f"{name} failed: {result_name(result)}.", result=result_name(result), call=name, code=int(result), pid=pid
        )
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def call_raw(name: str, *arguments: Any, pid: int | None = None) -> None:
    """Call a driver function with ctypes values: for what these bindings do not know. DriverError when it fails."""
    results = bindings().CUresult
    code = int(getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments))
    if code:
        result = results(code).name if code in set(results) else f"CUresult {code}"
        raise DriverError(f"{name} failed: {result}.", result=result, call=name, code=code, pid=pid)


def result_name(result: Any) -> str:
    """A CUresult by name, also one that these bindings do not know yet."""
    return str(getattr(result, "name", f"CUresult {result}"))


def _load() -> Any:
    try:
        from cuda.bindings import driver  # costs ~0.2 s, and nothing but GPU work needs it
    except ImportError as error:
        raise NoDriverError(
            f"The Python package cuda-bindings cannot be loaded ({error}).",
            advice="Install woodfrog with its dependencies again.",
            target_state=TargetState.UNTOUCHED,
        ) from error
    try:
        (result,) = driver.cuInit(0)
    except Exception as error:  # cuda-bindings' loader raises different types in different releases
        raise NoDriverError(
            f"There is no CUDA driver on this machine ({_first_line(error)}).",
            advice="Install an NVIDIA driver (570 or newer), or use the simulated GPU: `woodfrog demo`.",
            target_state=TargetState.UNTOUCHED,
        ) from error
    if int(result) != 0:
        raise NoDriverError(
            f"The CUDA driver does not start: {result_name(result)}.",
            advice="See whether nvidia-smi works, and whether the driver and its kernel module are of one version.",
            target_state=TargetState.UNTOUCHED,
            details={"result": result_name(result)},
        )
    return driver


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
