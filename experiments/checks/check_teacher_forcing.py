"""Check of teacher-forced task accuracy against free-running greedy decoding, on the embedded model.

    python -m experiments.checks.check_teacher_forcing --stats out/stats.safetensors

Both decode the same 16 items together until all have ended (a draining batch), with the same prefill. They can differ
only if an item has failed already and its later tokens change the routes of its batch mates. Appends a row per policy
to benchmarks/results/analysis.jsonl.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch

import moebudget
from moebudget.core import provenance
from moebudget.demo.run import BATCH, MODEL, NAME
from moebudget.demo.tasks import held_out
from moebudget.engines.transformers.loading import load_model
from moebudget.evaluate.tasks import _encode, cache_argument, evaluate_tasks, prefill

ROOT = Path(__file__).resolve().parents[2]


def free_running(model: Any, policy: Any, stats: Any, encoded: list[tuple[list[int], list[int]]]) -> list[bool]:
    """Greedy decoding of a batch, one cached step at a time; finished rows are fed the end token and do not vote."""
    cache, mask = prefill(model, [prompt for prompt, _ in encoded], torch.device("cpu"))
    token = torch.tensor([[prompt[-1]] for prompt, _ in encoded])
    written: list[list[int]] = [[] for _ in encoded]
    with moebudget.attach(model, policy, stats):
        for step in range(max(len(target) for _, target in encoded)):
            ended = torch.tensor([[step >= len(target)] for _, target in encoded])
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            logits = model(
                input_ids=torch.where(ended, model.config.eos_token_id, token),
                attention_mask=mask,
                position_ids=mask.sum(-1, keepdim=True) - 1,
                use_cache=True,
                **{cache_argument(model): cache},
            ).logits
            token = logits[:, -1:].argmax(-1)
            for row, best in zip(written, token.flatten().tolist(), strict=True):
                row.append(best)
    return [row[: len(target)] == target for row, (_, target) in zip(written, encoded, strict=True)]


@torch.no_grad()
def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--stats", type=Path, required=True)
    ap.add_argument("--items", type=int, default=32, help="items per task; answers above 16 tokens are left out")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/analysis.jsonl")
    a = ap.parse_args()
    stats = moebudget.load_stats(a.stats)
    model, tokenizer = load_model(str(MODEL), device="cpu", dtype="float32", stats=stats)
    items = held_out("test", a.items)
    random.Random(0).shuffle(items)
    start = tokenizer.eos_token_id
    items = [item for item in items if len(_encode(tokenizer, item, start)[1]) <= BATCH]
    encoded = [_encode(tokenizer, item, start) for item in items]
    rows = []
    for name in ("native", "base:budget=10", "base:budget=6", "oea:k0=1"):
        policy = moebudget.parse(name)
        options = {"batch": BATCH, "chunk": BATCH, "start_id": start, "quiet": True}
        forced = evaluate_tasks(model, [policy], stats, items, tokenizer, **options)[0]
        free = [
            hit
            for i in range(0, len(encoded), BATCH)
            for hit in free_running(model, policy, stats, encoded[i : i + BATCH])
        ]
        differ = sum(a != b for a, b in zip(free, forced.hits.tolist(), strict=True))
        row = {"bench": "teacher_forcing", "model": NAME, "B": BATCH, "policy": name, "items": len(items)}
        row |= {"forced_accuracy": round(100 * float(forced.hits.double().mean()), 2), "batching": "draining"}
        row |= {"free_accuracy": round(100 * sum(free) / len(free), 2), "items_that_differ": differ}
        rows.append({**row, "fetched": round(forced.counters.fetched, 3), **provenance.stamp("cpu")})
        print({k: row[k] for k in ("policy", "forced_accuracy", "free_accuracy", "items_that_differ")})
    provenance.append_rows(a.results, rows)


if __name__ == "__main__":
    main()
