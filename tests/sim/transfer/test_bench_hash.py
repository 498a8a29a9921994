"""The hash benchmark measures everything it promises, and finds every digest right, on the simulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

from woodfrog._native import paths

BENCH = Path(__file__).resolve().parents[3] / "bench" / "hash.py"


def test_the_hash_benchmark_runs_through_and_compares_every_digest(tmp_path: Path) -> None:
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(paths.simgpu_dir()),
        "WOODFROG_SIMGPU_MACHINE": f"bench-{uuid.uuid4().hex[:12]}",
        "WOODFROG_SIMGPU_MEMORY": "256MiB",
        "OUT": str(tmp_path),
        "WOODFROG_COMMIT": "test",
    }
    command = [sys.executable, str(BENCH), "--quick", "--size-gib", "0.004", "--drain-gib", "0.002", "--pieces", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = json.loads((tmp_path / "hash.json").read_text())
    summary = written["summary"]
    assert summary["complete"] == 1
    assert summary["wrong"] == 0
    assert summary.keys() >= {
        "read_ceiling_gb_per_s",
        "hash_gb_per_s",
        "hash_ratio_to_read_ceiling",
        "hash_pieces_ratio",
        "drain_ratio",
        "drain_ratio_min",
        "ceiling_d2h_gb_per_s",
    }
    kinds = [row["kind"] for row in written["rows"]]
    assert {"copies", "read", "hash", "fastest", "drain"} <= set(kinds)
