"""Endings of greedy generations (end token, loop, or token limit), in constant and in draining batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.evaluate.decode import Request, decode, ending_ids
from moebudget.evaluate.paired import FEW_SAMPLES

PROMPT = 32  # tokens of a window that `moebudget eval --generate` continues
PERIOD = 16  # tokens of the longest sequence that a loop repeats
COPIES = 3
LOOP = 12  # minimum length of a loop in tokens
BATCHINGS = ("constant", "draining")


@dataclass(frozen=True, slots=True)
class Generated:
    """Percent of continuations that loop, and that end with an end token, in one kind of batch.

    In a constant batch, `fetched` and `rows` count full steps only; `tail` is the percentage of steps in which the
    last requests drain. In draining batches they count all steps, and `tail` is 0.
    """

    policy: str
    batching: str
    loops: float
    ends: float
    n: int
    tokens: int  # maximum per continuation
    fetched: float
    rows: float  # per step
    tail: float

    def as_fields(self) -> dict[str, Any]:
        """Fields of a row of quality."""
        names = ("loops", "ends", "fetched", "rows", "tail")
        named = {f"gen_{self.batching}_{name}": round(getattr(self, name), 4) for name in names}
        return {"gen_n": self.n, "gen_tokens": self.tokens, **named}


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ends in three or more copies of up to 16 tokens that cover at least 12 tokens."""
    for period in range(1, PERIOD + 1):
        length = max(LOOP, COPIES * period)
        tail = tokens[-length:]
        if len(tail) == length and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


def generate(
    model: nn.Module,
    policies: Sequence[Policy],
    stats: Stats | None,
    prompts: Tensor,
    tokenizer: Any,
    *,
    tokens: int = 96,
    batch: int = 16,
    batchings: Sequence[str] = BATCHINGS,
    quiet: bool = False,
) -> list[Generated]:
    """Greedy continuations of prompts [n, P], `batch` in flight, every decode step under the policy; see `decode`.

    Raises ValueError for fewer than 30 prompts, too few for a rate, or fewer than `batch`, too few for a full step;
    UnsupportedCacheError if the model's cache does not allow a constant batch.
    """
    least = max(FEW_SAMPLES, batch)
    if len(prompts) < least:
        raise ValueError(f"{len(prompts)} prompts are too few for a rate: give at least {least} (--windows)")
    requests = [Request(tuple(prompt), tokens) for prompt in prompts.tolist()]
    runs = [(policy, batching) for policy in policies for batching in batchings]
    return [
        _generated(model, policy, stats, requests, tokenizer, batch, batching)
        for policy, batching in track(runs, "generations", console=Console(stderr=True, quiet=quiet))
    ]


def _generated(
    model: nn.Module,
    policy: Policy,
    stats: Stats | None,
    requests: Sequence[Request],
    tokenizer: Any,
    batch: int,
    batching: str,
) -> Generated:
    constant, ends, n = batching == "constant", ending_ids(model, tokenizer), len(requests)
    decoded = decode(model, policy, stats, requests, tokenizer, batch=batch, constant=constant, quiet=True)
    ended = sum(text[-1] in ends for text in decoded.tokens)
    looped = sum(text[-1] not in ends and loops(text) for text in decoded.tokens)
    all_steps = decoded.counters
    counted = decoded.full if constant else all_steps
    assert counted is not None  # there are at least as many requests as rows
    return Generated(
        policy.name,
        batching,
        100 * looped / n,
        100 * ended / n,
        n,
        requests[0].most,
        counted.fetched,
        counted.totals["rows"] / counted.totals["steps"],
        100 * (1 - counted.steps / all_steps.steps),
    )


def generated_table(rows: Sequence[Generated]) -> Table:
    """Rates of each policy by kind of batch, native routing included."""
    table = Table(
        title=f"{rows[0].n} greedy continuations of at most {rows[0].tokens} tokens",
        caption="constant: the next continuation takes the slot of a finished one; experts and rows of full steps; "
        "draining: the next continuations start when all have finished",
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("batch", no_wrap=True)
    for name in ("experts\nfetched", "rows\nper step", "loop, %", "end\ntoken, %", "token\nlimit, %"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        rest = 100 - r.loops - r.ends
        cells = [f"{r.fetched:.1f}", f"{r.rows:.1f}", f"{r.loops:.1f}", f"{r.ends:.1f}", f"{rest:.1f}"]
        table.add_row(r.policy, r.batching, *cells)
    return table
