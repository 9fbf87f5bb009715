"""How greedy generations end: by themselves, in a loop, or at the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from moebudget.evaluate.paired import FEW_SAMPLES
from moebudget.integrations.transformers import attach
from moebudget.policy import Policy
from moebudget.stats import Stats

PROMPT = 32  # tokens of a window that `moebudget eval --generate` continues
PERIOD = 16  # the longest piece that a loop repeats
COPIES = 3
LOOP = 12  # tokens that a loop covers at least


@dataclass(frozen=True, slots=True)
class Generated:
    """Percent of continuations that loop, and that end by themselves. A batch drains: nothing refills it."""

    policy: str
    loops: float
    ends: float
    n: int
    tokens: int  # at most, of a continuation
    fetched: float

    def as_fields(self) -> dict[str, Any]:
        """Fields of a row of quality."""
        return {
            "gen_loops": round(self.loops, 2), "gen_ends": round(self.ends, 2), "gen_n": self.n,
            "gen_tokens": self.tokens, "gen_fetched": round(self.fetched, 4), "gen_batching": "draining",
        }  # fmt: skip


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ends in three or more copies of a piece of up to 16 tokens, 12 tokens or more together."""
    for period in range(1, PERIOD + 1):
        length = max(LOOP, COPIES * period)
        tail = tokens[-length:]
        if len(tail) == length and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


@torch.no_grad()
def generate(
    model: nn.Module,
    policies: Sequence[Policy],
    stats: Stats | None,
    prompts: Tensor,
    *,
    end_id: int,
    tokens: int = 96,
    batch: int = 16,
    quiet: bool = False,
) -> list[Generated]:
    """Greedy continuations of prompts [n, P], `batch` at a time, every decode step under the policy.

    ValueError below 30 prompts, whose rates would say nothing.
    """
    if len(prompts) < FEW_SAMPLES:
        raise ValueError(f"{len(prompts)} prompts are too few for a rate: give at least {FEW_SAMPLES} (--windows)")
    device = next(model.parameters()).device
    found = []
    for policy in track(policies, "generations", console=Console(stderr=True, quiet=quiet)):
        texts: list[list[int]] = []
        with attach(model, policy, stats) as run:
            for part in prompts.to(device).split(batch):
                made: Any = model.generate(  # type: ignore[operator]
                    part, attention_mask=torch.ones_like(part), max_new_tokens=tokens, do_sample=False,
                    eos_token_id=end_id, pad_token_id=end_id,
                )  # fmt: skip
                texts += made[:, part.shape[1] :].tolist()
            fetched = run.counters.fetched
        ended = sum(end_id in text for text in texts)
        looped = sum(end_id not in text and loops(text) for text in texts)
        n = len(texts)
        found.append(Generated(policy.name, 100 * looped / n, 100 * ended / n, n, tokens, fetched))
    return found


def generated_table(rows: Sequence[Generated]) -> Table:
    """Rates beside the dense model's."""
    table = Table(title=f"{rows[0].n} greedy continuations of at most {rows[0].tokens} tokens, draining batch")
    table.add_column("policy", no_wrap=True)
    for name in ("experts fetched", "loop, %", "end by themselves, %", "at the limit, %"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        rest = 100 - r.loops - r.ends
        table.add_row(r.policy, f"{r.fetched:.1f}", f"{r.loops:.1f}", f"{r.ends:.1f}", f"{rest:.1f}")
    return table
