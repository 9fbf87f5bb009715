"""Functions that the task files name; lm-evaluation-harness loads this file by its path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets

from moebudget.evaluate.lm_eval.items import load_items
from moebudget.evaluate.lm_eval.scoring import RIGHT


def _items(task: str) -> Callable[..., dict[str, Any]]:
    def load(items: str | None = None, **_: Any) -> dict[str, Any]:
        return {"test": datasets.Dataset.from_list(load_items(task, items))}

    return load


def _score(task: str) -> Callable[[dict[str, Any], list[str]], dict[str, float]]:
    def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        return {"acc": float(RIGHT[task](doc, results[0]))}

    return score


cmmlu_items, cmmlu = _items("cmmlu"), _score("cmmlu")
boolq_items, boolq = _items("boolq"), _score("boolq")
bbh_items, bbh = _items("bbh"), _score("bbh")
math_items, math = _items("math"), _score("math")
gsm8k_items, gsm8k = _items("gsm8k"), _score("gsm8k")
math401_items, math401 = _items("math401"), _score("math401")
humaneval_items, humaneval = _items("humaneval"), _score("humaneval")
mbpp_items, mbpp = _items("mbpp"), _score("mbpp")
