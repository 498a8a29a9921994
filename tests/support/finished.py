"""How a run of the command line ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document that stdout is, with nothing beside it."""
        assert self.out.count("\n") == 1, self.out + self.err
        return json.loads(self.out)
