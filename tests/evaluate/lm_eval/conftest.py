"""Tests marked lm_eval need lm-evaluation-harness; `make test-lm-eval` runs them."""

from __future__ import annotations

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.evaluate.lm_eval.questions import ITEMS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("lm_eval") is None:
        skip = pytest.mark.skip(reason="lm-evaluation-harness is not installed here: make test-lm-eval")
        for item in items:
            if item.get_closest_marker("lm_eval"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of item files with the names of the real ones, half of them compressed."""
    path = tmp_path_factory.mktemp("items")
    for number, (name, items) in enumerate(ITEMS.items()):
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        if number % 2:
            (path / f"{name}.jsonl").write_text(text, encoding="utf-8")
        else:
            (path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return path
