"""The errors of this package, each one sentence with the place in the file where there is one.

Nothing here may depend on how a file was opened or on the rest of woodfrog beyond its error base.
"""

from __future__ import annotations

from woodfrog.errors import ExitCode, TargetState, WoodfrogError


class KernelFileError(WoodfrogError):
    """A file does not hold GPU code, or holds damaged GPU code. Nothing was changed anywhere."""

    exit_code = ExitCode.FAILED

    def __init__(self, reason: str, *, advice: str = "") -> None:
        super().__init__(reason, advice=advice, target_state=TargetState.NONE)


class NoGpuCodeError(KernelFileError):
    """A file that is fine, and holds no GPU code."""


class PtxError(KernelFileError):
    """PTX text that cannot be read; `line` and `column` count from 1."""

    def __init__(self, message: str, *, line: int, column: int) -> None:
        super().__init__(f"PTX line {line}, column {column}: {message}")
        self.line = line
        self.column = column


class AnalysisLimitError(WoodfrogError):
    """A kernel is larger than the analysis takes on; it has no template and is treated as touching everything."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, target_state=TargetState.NONE)
