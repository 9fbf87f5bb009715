"""The two diagnoses: an estimate by bytes, and step times measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moebudget.bench.decode import run_decode
from moebudget.bench.diagnose.bandwidth import copy_bandwidth
from moebudget.bench.diagnose.roofline import GPUS, Roofline, roofline
from moebudget.bench.diagnose.verdict import LEAST_GAIN, Verdict, judge, judge_shape, too_many_rows
from moebudget.bench.engine import Turn
from moebudget.bench.line import fit
from moebudget.bench.sizes import UNIONS
from moebudget.core.errors import unknown
from moebudget.engines.transformers.loading import require_memory

ENGINES = ("none", "hf", "vllm")
PROMPT = 32  # tokens of each prompt
REPEATS = 3  # turns of a vLLM engine over the budgets
Timed = dict[int, tuple[list[tuple[float, float]], float]]  # by batch: (experts, ms) per budget, the native union


def sweep(shape: Roofline, budget: int, batch: int) -> list[int]:
    """Budgets at which steps are timed: all experts, `budget`, and five below what `batch` rows can fetch."""
    most = min(shape.experts, batch * shape.top_k)
    marks = {shape.experts, budget, *(round(most * part) for part in (0.5, 0.375, 0.25, 0.125, 0.0625))}
    return sorted((m for m in marks if 1 <= m <= shape.experts), reverse=True)


def estimate(
    config: dict[str, Any],
    *,
    batch: int,
    budget: int,
    union: float | None,
    context: int,
    gpu: str | None,
    bandwidth: float | None,
) -> dict[str, Any]:
    """The estimate by bytes alone. Raises ValueError without a bandwidth or for an unknown GPU."""
    if gpu is not None and gpu not in GPUS:
        raise ValueError(unknown("gpu", gpu, list(GPUS)))
    gb_s = bandwidth if bandwidth is not None else None if gpu is None else GPUS[gpu]
    if gb_s is None:
        raise ValueError("the estimate needs a memory bandwidth: use --gpu H200, or --bandwidth 4800 (GB/s)")
    if gb_s <= 0:
        raise ValueError(f"bandwidth={gb_s:g} GB/s must be above 0")
    shape = roofline(config)
    fetched = shape.union(batch) if union is None else union
    marks = sorted({min(float(m), fetched) for m in sweep(shape, budget, batch)} | {fetched}, reverse=True)
    whole = shape.step_ms(fetched, batch, context, gb_s)
    points = [(m, ms, whole / ms) for m in marks for ms in (shape.step_ms(m, batch, context, gb_s),)]
    gain = whole / shape.step_ms(min(budget, fetched), batch, context, gb_s)
    early = judge_shape(shape, batch=batch, union=fetched, budget=budget)
    verdict = (
        early
        or too_many_rows(shape, batch=batch, budget=budget, gain=gain)
        or Verdict(
            "cannot tell" if gain >= LEAST_GAIN else "will not help",
            f"at most {gain:.2f} times faster by bytes alone, from {fetched:.1f} experts per layer"
            f"{' if all are equally likely' if union is None else ''}; launches, arithmetic and routing are not "
            "included: measure with --engine vllm",
            gain,
        )
    )
    title = f"estimate by bytes, not a measurement: {batch} rows, {context} cached tokens per row, {gb_s:,.0f} GB/s"
    return _row(title, shape, "none", batch, budget, fetched, points, verdict, gb_s, "cpu")


def measure(
    model: str,
    config: dict[str, Any],
    engine: str,
    *,
    batches: Sequence[int],
    budget: int,
    union: float | None = None,
    data: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    steps: int | None = None,
    gb_s: float | None = None,
    turn: Turn | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Step times on this machine, the line through them, and the verdict: one row per batch size, all from one engine.

    If every verdict follows from the shape, nothing is started. `gb_s` replaces the measured bandwidth; `turn` and
    `arguments` of vLLM's LLM are as in `bench.decode.run_decode`. Raises ValueError for a union with several batch
    sizes.
    """
    if union is not None and len(batches) > 1:
        raise ValueError(f"union={union:g} belongs to one batch size, but there are {len(batches)}; give one --batch")
    shape = roofline(config)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    unions = {batch: UNIONS.get(model) if union is None and batch == 16 else union for batch in batches}
    early = {
        batch: judge_shape(shape, batch=batch, union=shape.experts if known is None else known, budget=budget)
        for batch, known in unions.items()
    }
    if None not in early.values():
        verdicts = [(b, unions[b], v) for b, v in early.items() if v is not None]
        return [_row("not measured", shape, engine, b, budget, u, [], v, None, where) for b, u, v in verdicts]
    gb_s = copy_bandwidth(torch.device(where)) if gb_s is None else gb_s
    options = {} if steps is None else {"steps": steps}
    budgets = {batch: sweep(shape, budget, batch) for batch in batches}
    if engine == "hf":
        timed = _hf(model, budgets, data=data, device=where, dtype=dtype, **options)
    else:
        timed = _vllm(model, config, budgets, device=where, turn=turn, arguments=arguments or {}, **options)
    rows = []
    for batch, (times, native) in timed.items():
        known, line = native if unions[batch] is None else unions[batch], fit(times)
        assert known is not None
        verdict = judge(line, shape, batch=batch, union=known, budget=budget, gb_s=gb_s)
        points = [(fetched, ms, line.at(known) / ms) for fetched, ms in times]
        sign = "-" if line.b < 0 else "+"
        slope = f"{sign} {abs(line.b):.4f} ms per expert per layer"
        title = f"{engine}, {batch} rows: {line.a:.3f} ms {slope}, R² {line.r2:.3f}"
        row = _row(title, shape, engine, batch, budget, known, points, verdict, gb_s, where)
        fitted = {"a_ms": line.a, "b_ms": line.b, "b_half_ms": line.b_half, "r2": line.r2, "native_union": native}
        rows.append({**row, **fitted, "b_over_price": line.b / shape.expert_ms(gb_s)})
    return rows


def _hf(
    model: str,
    budgets: Mapping[int, Sequence[int]],
    *,
    data: str | None,
    device: str,
    dtype: str | None,
    steps: int = 8,
) -> Timed:
    from moebudget.bench.diagnose.hf import step_times
    from moebudget.engines.transformers.loading import default_dtype, load_model, vocabulary
    from moebudget.evaluate.corpus import read_windows

    assert data is not None
    loaded, tokenizer = load_model(model, device=device, dtype=default_dtype(device) if dtype is None else dtype)
    most = max(budgets)
    text = read_windows(data, tokenizer, vocabulary(loaded), PROMPT - 1, most, tokenizer.eos_token_id)
    if len(text) < most:
        raise ValueError(f"{data} has {len(text)} windows of {PROMPT} tokens, and {most} rows need {most}")
    return {batch: step_times(loaded, text[:batch].to(device), marks, steps) for batch, marks in budgets.items()}


def _vllm(
    model: str,
    config: dict[str, Any],
    budgets: Mapping[int, Sequence[int]],
    *,
    device: str,
    turn: Turn | None,
    arguments: Mapping[str, Any],
    steps: int = 128,
) -> Timed:
    if "quantization_config" not in config:
        shape = roofline(config)
        whole = shape.other_bytes + shape.layers * shape.experts * shape.expert_bytes
        require_memory(whole, device, f"{model} in bf16")
    rows = run_decode(
        model, "squared:budget=16", budgets, tuple(budgets), prompt=PROMPT, tokens=steps, repeats=REPEATS,
        baseline=False, turn=turn, **arguments,
    )  # fmt: skip
    timed: Timed = {}
    for batch in budgets:
        of_batch = [row for row in rows if row["bench"] == "decode" and row["B"] == batch]
        timed[batch] = [(row["fetched"], row["tpot_ms"]) for row in of_batch], of_batch[0]["native_union"]
    return timed


def _row(
    title: str,
    shape: Roofline,
    engine: str,
    batch: int,
    budget: int,
    union: float | None,
    points: Sequence[tuple[float, float, float]],
    verdict: Verdict,
    gb_s: float | None,
    device: str,
) -> dict[str, Any]:
    return {
        "title": title, "engine": engine, "B": batch, "M": budget, "N": shape.experts, "K": shape.top_k,
        "layers": shape.layers, "expert_bytes": shape.expert_bytes, "union": union, "gb_s": gb_s,
        "price_ms": None if gb_s is None else shape.expert_ms(gb_s), "points": list(points), "answer": verdict.answer,
        "reason": verdict.reason, "speedup": verdict.speedup, "speedup_half": verdict.speedup_half, "device": device,
    }  # fmt: skip
