"""Ledger of quality rows: rows in its file are read, missing ones are measured and appended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from moebudget.core import provenance
from moebudget.core.policy import Policy
from moebudget.evaluate.quality import Quality
from moebudget.methods.native import native

KEY = ("model_hash", "stats_hash", "dtype", "B", "text_hash", "items_hash", "length", "sliced_by")
Row = dict[str, Any]


def hash_windows(windows: Tensor) -> str:
    """Twelve hex digits over tokens [n, S + 1] and their shape."""
    digest = hashlib.sha256(str(tuple(windows.shape)).encode())
    digest.update(windows.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def hash_items(items: Sequence[Any]) -> str | None:
    """Twelve hex digits over task items; None for none."""
    if not items:
        return None
    return hashlib.sha256(json.dumps([[i.task, i.prompt, i.target] for i in items]).encode()).hexdigest()[:12]


def hash_slices(slices: Sequence[str]) -> str | None:
    """Twelve hex digits over the slices of windows; None for none."""
    return hashlib.sha256(json.dumps(slices).encode()).hexdigest()[:12] if slices else None


def hash_file(path: Path | None) -> str | None:
    """Twelve hex digits over a file's bytes; None without a file."""
    if path is None:
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


@dataclass(slots=True)
class Ledger:
    """Quality rows of one `setting`, the fields of KEY. Rows of a policy without statistics suit all files."""

    path: Path
    name: str
    setting: Row
    stamp: Row
    measure: Callable[[list[Policy]], list[Quality]]  # rows of native routing first, then of the policies
    measured: int = 0  # policies measured, not read from the file
    rows: list[Row] = field(default_factory=list)
    _used: dict[str, Row] = field(default_factory=dict)

    def read(self) -> None:
        """Read the file's rows. Raises ValueError for a line that is not a row of moebudget."""
        if not self.path.is_file():
            return
        for where, row in provenance.json_lines(self.path):
            if not isinstance(row, dict) or "bench" not in row:
                raise ValueError(f"{where}: not a row of a moebudget command, which has the key 'bench'")
            self.rows += [row] if row["bench"] == "tune" else []

    def get(self, policies: Sequence[Policy]) -> list[Row]:
        """One row per policy; rows that are not in the file are measured."""
        missing = [p for p in policies if p.name != "native" and self._known(p) is None]
        if missing or any(self._known(p) is None for p in policies):
            new = [
                {**q.as_row(self.name), "bench": "tune", **self._key(p), **self.stamp}
                for p, q in zip([native(), *missing], self.measure(missing), strict=True)
                if self._known(p) is None
            ]
            provenance.append_rows(self.path, new)
            self.rows += new
            self.measured += len(missing)
        rows = [row for p in policies for row in (self._known(p),) if row is not None]
        self._used |= {row["policy"]: row for row in rows}
        return rows

    def used(self) -> list[Row]:
        """The rows returned so far, in the order of the requests."""
        return list(self._used.values())

    def _key(self, policy: Policy) -> Row:
        return self.setting if policy.needs else {**self.setting, "stats_hash": None}

    def _known(self, policy: Policy) -> Row | None:
        key = {**self._key(policy), "policy": policy.name}
        return next((r for r in self.rows if all(r.get(k) == v for k, v in key.items())), None)


def setting(
    *,
    model_hash: str,
    stats: Path | None,
    dtype: str,
    batch: int,
    windows: Tensor,
    items: Sequence[Any],
    slices: Sequence[str] = (),
) -> Row:
    """The fields that must be equal for a row to be used again."""
    values = (
        model_hash, hash_file(stats), dtype, batch, hash_windows(windows), hash_items(items), windows.shape[1] - 1,
        hash_slices(slices),
    )  # fmt: skip
    return dict(zip(KEY, values, strict=True))
