"""How greedy generations end: by themselves, in a loop, or at the limit; in a constant batch, and in draining ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from moebudget.evaluate.decode import Request, decode, ending_ids
from moebudget.evaluate.paired import FEW_SAMPLES
from moebudget.policy import Policy
from moebudget.stats import Stats

PROMPT = 32  # tokens of a window that `moebudget eval --generate` continues
PERIOD = 16  # the longest piece that a loop repeats
COPIES = 3
LOOP = 12  # tokens that a loop covers at least
BATCHINGS = ("constant", "draining")


@dataclass(frozen=True, slots=True)
class Generated:
    """Percent of continuations that loop, and that end by themselves, in one kind of batch.

    `fetched` and `rows` are of the steps with all rows where the batch is constant; its last requests drain in `tail`
    percent of the steps. They are of all steps, and `tail` is 0, where every batch drains.
    """

    policy: str
    batching: str
    loops: float
    ends: float
    n: int
    tokens: int  # at most, of a continuation
    fetched: float
    rows: float  # a step
    tail: float

    def as_fields(self) -> dict[str, Any]:
        """Fields of a row of quality."""
        names = ("loops", "ends", "fetched", "rows", "tail")
        named = {f"gen_{self.batching}_{name}": round(getattr(self, name), 4) for name in names}
        return {"gen_n": self.n, "gen_tokens": self.tokens, **named}


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ends in three or more copies of a piece of up to 16 tokens, 12 tokens or more together."""
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

    ValueError below 30 prompts, whose rates would say nothing, and for fewer than `batch`, which fill no step;
    UnsupportedCacheError where the model's cache allows no constant batch.
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
    found = decode(model, policy, stats, requests, tokenizer, batch=batch, constant=constant, quiet=True)
    ended = sum(text[-1] in ends for text in found.tokens)
    looped = sum(text[-1] not in ends and loops(text) for text in found.tokens)
    everything = found.counters
    mine = found.full if constant else everything
    assert mine is not None  # as many requests as rows at least
    return Generated(
        policy.name,
        batching,
        100 * looped / n,
        100 * ended / n,
        n,
        requests[0].most,
        mine.fetched,
        mine.totals["rows"] / mine.totals["steps"],
        100 * (1 - mine.steps / everything.steps),
    )


def generated_table(rows: Sequence[Generated]) -> Table:
    """Rates beside the dense model's, the two kinds of batch apart."""
    table = Table(
        title=f"{rows[0].n} greedy continuations of at most {rows[0].tokens} tokens",
        caption="constant: a finished continuation's place is taken by the next, experts and rows of full steps; "
        "draining: the next ones start when all have finished",
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("batch", no_wrap=True)
    for name in ("experts\nfetched", "rows\na step", "loop, %", "end by\nthemselves, %", "at the\nlimit, %"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        rest = 100 - r.loops - r.ends
        cells = [f"{r.fetched:.1f}", f"{r.rows:.1f}", f"{r.loops:.1f}", f"{r.ends:.1f}", f"{rest:.1f}"]
        table.add_row(r.policy, r.batching, *cells)
    return table
