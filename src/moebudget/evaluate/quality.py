"""Quality of policies: all measures with their intervals, for tables, plots and benchmark rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table
from torch import Tensor, nn

from moebudget.calibrate.data import TokenizerLike
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.engines.transformers.families import moe_layers
from moebudget.evaluate.native import NativeRun, with_native
from moebudget.evaluate.noise import task_noise, text_noise
from moebudget.evaluate.paired import FEW_SAMPLES, TASKS, TEXT, Z95, Paired, by_slice, paired, paired_hits, verdict
from moebudget.evaluate.retained import retained_energy
from moebudget.evaluate.tasks import Item, TaskResult, evaluate_tasks
from moebudget.evaluate.text import TextResult, evaluate_text
from moebudget.methods.native import native


@dataclass(frozen=True, slots=True)
class Quality:
    """Measures of one policy. `half` fields are half widths of 95 % intervals, NaN below 30 samples."""

    policy: str
    batch: int
    fetched: float  # distinct experts per layer per step, on the text
    native_union: float
    megabytes: float  # of expert weights per step, all layers together
    nll: float
    native_nll: float
    nll_delta_half: float  # of nll - native_nll, paired by sequence
    agreement: float  # percent of positions with the same most likely token as native routing
    agreement_half: float
    retained_energy: float
    tasks: dict[str, float]
    task_avg: float | None
    task_half: float | None
    task_fetched: float | None
    tokens: int
    items: int
    loss_gap: Paired | None = None  # nll - native_nll over the windows; NaN ends below 30; None for native
    task_gap: Paired | None = None  # points of task_avg lost against native, over the items
    by_quarter: tuple[float, ...] = ()  # agreement in each quarter of the window
    loss_noise: float | None = None  # band of nll over batch compositions
    task_noise: float | None = None  # band of task_avg, in points
    batching: str = "constant"  # of the tasks; or "draining"
    fetched_by_layer: tuple[float, ...] = ()  # on the text
    slices: dict[str, Paired] = dataclasses.field(default_factory=dict)  # loss_gap of each language or domain

    @property
    def delta(self) -> float:
        """Loss increase over native (nats per token)."""
        return self.nll - self.native_nll

    def as_row(self, model: str) -> dict[str, Any]:
        """The fields of a line in benchmarks/results/quality.jsonl, without the stamp."""
        return {
            "bench": "quality",
            "model": model,
            "B": self.batch,
            "policy": self.policy,
            "fetched": round(self.fetched, 4),
            "fetched_by_layer": [round(count, 3) for count in self.fetched_by_layer],
            "native_union": round(self.native_union, 4),
            "nll": round(self.nll, 5),
            "native_nll": round(self.native_nll, 5),
            "nll_delta_ci95": _rounded(self.nll_delta_half, 5),
            "tasks": {t: round(a, 2) for t, a in self.tasks.items()},
            "task_avg": _rounded(self.task_avg, 3),
            "task_ci95": _rounded(self.task_half, 3),
            "task_fetched": _rounded(self.task_fetched, 4),
            "agreement": round(self.agreement, 3),
            "agreement_ci95": _rounded(self.agreement_half, 3),
            "retained_energy": _rounded(self.retained_energy, 5),
            "expert_mb_per_step": round(self.megabytes, 4),
            "tokens": self.tokens,
            "items": self.items,
            "batching": self.batching,
            **_gap_fields("nll", self.loss_gap, self.loss_noise, 5),
            **_gap_fields("task", self.task_gap, self.task_noise, 3),
            "agreement_by_quarter": [round(a, 2) for a in self.by_quarter],
            "verdict": None if self.loss_gap is None else verdict(self.loss_gap, TEXT),
            "task_verdict": None if self.task_gap is None else verdict(self.task_gap, TASKS),
            **(
                {"slices": {n: _gap_fields("nll", gap, None, 5) for n, gap in self.slices.items()}}
                if self.slices
                else {}
            ),
        }


def _gap_fields(name: str, gap: Paired | None, noise: float | None, digits: int) -> dict[str, Any]:
    """The interval of a difference, its number of samples and the noise band, as fields of a row."""
    return {
        f"{name}_delta": None if gap is None else round(gap.mean, digits),
        f"{name}_delta_low": None if gap is None else _rounded(gap.low, digits),
        f"{name}_delta_high": None if gap is None else _rounded(gap.high, digits),
        f"{name}_n": None if gap is None else gap.n,
        f"{name}_noise": _rounded(noise, digits),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or value != value else round(value, digits)


def half_width(samples: Tensor) -> float:
    """Half width of the 95 % interval of the mean of independent samples [n] (normal); NaN for fewer than 30."""
    if len(samples) < FEW_SAMPLES:
        return float("nan")
    return float(Z95 * samples.double().std() / len(samples) ** 0.5)


def expert_bytes(model: nn.Module, bytes_per_weight: float = 2.0) -> float:
    """Bytes of one routed expert, mean over the layers; bf16 has 2 bytes per weight."""
    layers = moe_layers(model)
    sizes = [sum(p.numel() for p in layer.experts.parameters()) / layer.spec.num_experts for layer in layers]
    return bytes_per_weight * sum(sizes) / len(sizes)


def evaluate(
    model: nn.Module,
    policies: Sequence[Policy],
    stats: Stats | None,
    windows: Tensor,
    *,
    items: Sequence[Item] = (),
    tokenizer: TokenizerLike | None = None,
    start_id: int | None = None,
    batch: int = 16,
    prefill: int = 1,
    retained_windows: int = 32,
    refill: bool = True,
    slices: Sequence[str] = (),
    native_run: NativeRun | None = None,
    noise: bool = False,
    quiet: bool = False,
) -> list[Quality]:
    """Evaluate policies on the same batches; native routing comes first if it is not among them.

    windows [n, S + 1] is held-out text; items need the tokenizer. Retained energy uses the first `retained_windows`
    (NaN for 0). `refill` is passed to `evaluate_tasks`. `slices` [n] names the slice of each window; every slice gets
    a separate loss difference. `native_run` holds native routing's results on these samples, which are then not
    measured again. `noise` runs up to four batches again, in another composition.
    """
    policies = list(policies)
    if not any(p.name == "native" for p in policies):
        policies.insert(0, native())
    native_run = native_run or NativeRun()
    reading: dict[str, Any] = {"batch": batch, "prefill": prefill, "native_best": native_run.best, "quiet": quiet}
    read = partial(evaluate_text, model, stats=stats, windows=windows, **reading)
    text = with_native(policies, native_run.text, lambda rerun: read(policies=rerun))
    text_bands: list[float | None] = [None] * len(policies)
    if noise:
        text_bands = text_noise(model, text, stats, windows, batch=batch, prefill=prefill, quiet=quiet)
    tasks: list[TaskResult | None] = [None] * len(policies)
    task_bands: list[float | None] = [None] * len(policies)
    if items:
        if tokenizer is None:
            raise ValueError("task items need the model's tokenizer")
        asking: dict[str, Any] = {"batch": batch, "start_id": start_id, "refill": refill, "quiet": quiet}
        ask = partial(evaluate_tasks, model, stats=stats, items=items, tokenizer=tokenizer, **asking)
        answered = with_native(policies, native_run.tasks, lambda rerun: ask(policies=rerun))
        tasks = list(answered)
        task_bands = task_noise(model, answered, stats, items, tokenizer, **asking) if noise else task_bands
    retained = [float("nan")] * len(policies)
    if retained_windows:
        retained = retained_energy(model, policies, stats, windows[:retained_windows], batch=batch)
    reference = next(i for i, p in enumerate(policies) if p.name == "native")
    size = expert_bytes(model) * len(moe_layers(model)) / 1e6
    return [
        dataclasses.replace(
            _quality(text[i], text[reference], tasks[i], tasks[reference], batch, size),
            retained_energy=retained[i],
            loss_noise=text_bands[i],
            task_noise=task_bands[i],
            batching="constant" if refill else "draining",
            slices=by_slice(text[i].nll - text[reference].nll, slices) if i != reference else {},
        )
        for i in range(len(policies))
    ]


def _quality(
    text: TextResult,
    native_text: TextResult,
    tasks: TaskResult | None,
    native_tasks: TaskResult | None,
    batch: int,
    size: float,
) -> Quality:
    fetched, is_native = text.counters.fetched, text is native_text
    return Quality(
        policy=text.policy.name,
        batch=batch,
        fetched=fetched,
        native_union=text.counters.native_union,
        megabytes=fetched * size,
        nll=float(text.nll.mean()),
        native_nll=float(native_text.nll.mean()),
        nll_delta_half=half_width(text.nll - native_text.nll),
        agreement=100 * float(text.agreement.mean()),
        agreement_half=100 * half_width(text.agreement),
        retained_energy=float("nan"),
        tasks={} if tasks is None else tasks.accuracy,
        task_avg=None if tasks is None else tasks.average,
        task_half=None if tasks is None else tasks.half_width,
        task_fetched=None if tasks is None else tasks.counters.fetched,
        tokens=text.tokens,
        items=0 if tasks is None else len(tasks.hits),
        loss_gap=None if is_native else paired(text.nll - native_text.nll),
        task_gap=None if tasks is None or native_tasks is None or is_native else _lost(tasks, native_tasks),
        by_quarter=tuple(100 * float(part.mean()) for part in text.by_position.chunk(4)),
        fetched_by_layer=tuple(text.counters.fetched_by_layer),
    )


def _lost(tasks: TaskResult, native_tasks: TaskResult) -> Paired:
    return paired_hits(tasks.hits, native_tasks.hits, tasks.tasks)


def pm(value: float, half: float | None, digits: int) -> str:
    """`value ± half`, or the value alone if there is no interval (NaN, or None as in rows)."""
    has_interval = half is not None and half == half
    return f"{value:.{digits}f}" + (f" ± {half:.{digits}f}" if has_interval else "")


def quality_table(rows: Sequence[Quality], title: str) -> Table:
    """The table of quality, one row per policy; tasks and retained energy have columns if they were measured."""
    table = Table(
        title=title,
        caption="experts per layer per step; loss increase in nats per token; ± half of a 95 % interval, for the loss "
        "paired with native routing, from 30 sequences on",
    )
    table.add_column("policy", no_wrap=True)
    with_tasks = any(r.task_avg is not None for r in rows)
    with_energy = any(r.retained_energy == r.retained_energy for r in rows)
    names = ["experts\nfetched", "MB per\nstep", "loss increase\nover native", "same token\nas native, %"]
    names += ["retained\nenergy"] * with_energy + ["experts\non tasks", "tasks\ncorrect, %"] * with_tasks
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        cells = [r.policy, f"{r.fetched:.1f}", f"{r.megabytes:.1f}"]
        cells.append(f"loss {r.nll:.3f}" if r.policy == "native" else f"+{pm(r.delta, r.nll_delta_half, 3)}")
        cells += [pm(r.agreement, r.agreement_half, 1), *([f"{r.retained_energy:.3f}"] if with_energy else [])]
        if with_tasks and r.task_avg is not None:
            cells.append("" if r.task_fetched is None else f"{r.task_fetched:.1f}")
            cells.append(pm(r.task_avg, r.task_half, 1))
        table.add_row(*cells)
    return table
