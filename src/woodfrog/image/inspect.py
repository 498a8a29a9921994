"""What a person or a program wants to know of an image, as one JSON-able value and as short lines of text.

Text here is plain: colours and tables are the command line's. It must never show what the image's memory holds.
"""

from __future__ import annotations

import time
from typing import Any

from woodfrog.image.manifest import DIGEST_BYTES, Amounts, Manifest, Stats


def summary(manifest: Manifest) -> dict[str, Any]:
    """The manifest without its millions: counts and sizes instead of chunk digests and allocation rows."""
    return {
        "reference": manifest.reference,
        "kind": manifest.kind,
        "created_unix_s": manifest.created_unix_s,
        "created": iso_time(manifest.created_unix_s),
        "woodfrog_version": manifest.woodfrog_version,
        "target_name": manifest.target_name,
        "operation": manifest.operation,
        "leave_running": manifest.leave_running,
        "parent": manifest.parent,
        "gpu_pid": manifest.gpu_pid,
        "gpu_pids": [process.pid for process in manifest.gpu_processes] or [manifest.gpu_pid],
        "gpu_bytes": manifest.gpu_bytes,
        "cpu_bytes": manifest.cpu_bytes,
        "chunk_bytes": manifest.chunk_bytes,
        "chunks": len(manifest.digests) // DIGEST_BYTES,
        "handles": len(manifest.handles),
        "allocations": len(manifest.allocations),
        "driver": {
            "cuda_version": manifest.driver.cuda_version,
            "release": manifest.driver.release,
            "simulated": manifest.driver.simulated,
        },
        "devices": [
            {
                "ordinal": device.ordinal,
                "uuid": device.uuid,
                "name": device.name,
                "total_bytes": device.total_bytes,
                "compute_capability": f"{device.compute_major}.{device.compute_minor}",
                "data_bytes": sum(handle.size for handle in manifest.handles if handle.device == index),
            }
            for index, device in enumerate(manifest.devices)
        ],
        "host": {
            "hostname": manifest.host.hostname,
            "kernel": manifest.host.kernel,
            "architecture": manifest.host.architecture,
        },
        "processes": [
            {"pid": process.pid, "parent_pid": process.parent_pid, "command_line": process.command_line}
            for process in manifest.processes
        ],
        "cpu": None
        if manifest.cpu is None
        else {
            "tool": manifest.cpu.tool,
            "version": manifest.cpu.version,
            "options": manifest.cpu.options,
            "root_pid": manifest.cpu.root_pid,
            "files": len(manifest.cpu.files),
        },
        "environment": {
            "uid": manifest.environment.uid,
            "gid": manifest.environment.gid,
            "working_directory": manifest.environment.working_directory,
            "log_path": manifest.environment.log_path,
        },
        "stats": {"gpu": _amounts(manifest.stats.gpu), "cpu": _amounts(manifest.stats.cpu)},
        "phases": {phase.name: phase.seconds for phase in manifest.phases},
        "stall_s": manifest.stall_s,
        "notes": manifest.notes,
    }


def lines(manifest: Manifest) -> list[tuple[str, str]]:
    """(what, value) pairs in the order in which a person asks."""
    cuda = manifest.driver.cuda_version
    driver = f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    if manifest.driver.release:
        driver += f", driver {manifest.driver.release}"
    if manifest.driver.simulated:
        driver += " (simulated)"
    found = [
        ("image", manifest.reference),
        ("created", iso_time(manifest.created_unix_s)),
        ("target", f"{manifest.target_name or '-'} ({_gpu_pids(manifest)}), {manifest.kind}"),
        ("afterwards", "ran on" if manifest.leave_running else "stopped"),
        ("GPU memory", f"{human_bytes(manifest.gpu_bytes)} in {len(manifest.handles)} handles, "
                       f"{len(manifest.allocations)} allocations"),
        ("CPU side", f"{human_bytes(manifest.cpu_bytes)}, CRIU {manifest.cpu.version}" if manifest.cpu else "none"),
        ("new in it", f"{human_bytes(_new(manifest.stats))}, {human_bytes(_stored(manifest.stats))} stored"),
        ("driver", driver),
    ]  # fmt: skip
    for device in manifest.devices:
        capability = f"{device.compute_major}.{device.compute_minor}"
        found.append(
            (
                f"GPU {device.ordinal}",
                f"{device.name}, {capability}, {human_bytes(device.total_bytes)}, {gpu_uuid(device.uuid)}",
            )
        )
    found.append(("host", f"{manifest.host.hostname}, {manifest.host.architecture}, kernel {manifest.host.kernel}"))
    for process in manifest.processes:
        found.append((f"process {process.pid}", printable(" ".join(process.command_line)) or process.executable))
    found.append(("written by", f"woodfrog {manifest.woodfrog_version}"))
    return found


def _amounts(amounts: Amounts) -> dict[str, int]:
    names = ("raw", "zero", "known", "new", "stored")
    return {f"{name}_bytes": getattr(amounts, name) for name in names}


def _new(stats: Stats) -> int:
    return stats.gpu.new + stats.cpu.new


def _stored(stats: Stats) -> int:
    return stats.gpu.stored + stats.cpu.stored


def gpu_uuid(digits: str) -> str:
    """32 hex digits as the driver's tools write them: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx."""
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def printable(text: str, limit: int = 200) -> str:
    """Text out of an image, safe for a terminal: control characters are shown, not sent."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def human_bytes(size_bytes: float) -> str:
    """1.5 GB, 640 kB, 12 B: decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5 or unit == "GB":
            break
        size_bytes /= 1000
    return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.3g} {unit}"


def iso_time(unix_s: float) -> str:
    """Local time to the second; "unknown" for what no clock shows (the number comes out of an image)."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return "unknown"


def _gpu_pids(manifest: Manifest) -> str:
    if not manifest.gpu_processes:
        return f"pid {manifest.gpu_pid}"
    return "pids " + ", ".join(str(process.pid) for process in manifest.gpu_processes)
