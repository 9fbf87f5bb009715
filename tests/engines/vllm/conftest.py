"""Engines for the tests: each list of jobs runs in a separate process and returns its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ROOM = "tests.engines.vllm"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
Drive = Callable[..., list[dict[str, Any]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked vllm if it is not installed; `make test-vllm` runs them."""
    if find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed here: make test-vllm")
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(skip)


def start(module: str, *args: str, env: dict[str, str] | None = None, log: Path) -> None:
    """Run a module of this folder in the environment of the tests; on failure, show the end of its log."""
    command = [sys.executable, "-m", module, *args]
    with log.open("w") as out:
        process = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, **(env or {})}, stdout=out, stderr=out, check=False
        )
    assert process.returncode == 0, log.read_text()[-4000:]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny checkpoints, and statistics of one of them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    start(f"{ROOM}.checkpoints", str(folder), log=folder / "log.txt")
    return folder


@pytest.fixture(scope="session")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """drive(jobs, env=...) -> answers, see drive.py."""

    def run(jobs: list[dict[str, Any]], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("drive")
        jobs_file, answers_file = folder / "jobs.json", folder / "answers.json"
        jobs_file.write_text(json.dumps(jobs))
        start(f"{ROOM}.drive", str(jobs_file), str(answers_file), env=env, log=folder / "log.txt")
        return json.loads(answers_file.read_text())  # type: ignore[no-any-return]

    return run
