"""The two ways to an answer: by the estimate alone, and by step times on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moebudget.bench.sizes import SIZES, UNIONS
from moebudget.diagnose.hf import copy_bandwidth, step_times
from moebudget.diagnose.roofline import GPUS, Roofline, roofline
from moebudget.diagnose.verdict import LEAST_GAIN, Verdict, fit, judge, judge_shape
from moebudget.integrations.loading import require_memory
from moebudget.spelling import unknown

ENGINES = ("none", "hf", "vllm")
PROMPT = 32  # tokens of text before decoding, for engine hf


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a folder, of a file, or of one of SIZES. FileNotFoundError for anything else."""
    if model in SIZES:
        return SIZES[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"{model!r} is no folder with a config.json, no such file, and none of {', '.join(SIZES)}"
        )
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def sweep(shape: Roofline, budget: int) -> list[int]:
    """Budgets at which steps are timed: all experts, the one asked for, and five between and below."""
    marks = {shape.experts, budget, *(round(shape.experts * part) for part in (0.5, 0.375, 0.25, 0.125, 0.0625))}
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
    """What the bytes alone say. Raises ValueError without a bandwidth or for a GPU that is not in the list."""
    if gpu is not None and gpu not in GPUS:
        raise ValueError(unknown("gpu", gpu, list(GPUS)))
    gb_s = bandwidth if bandwidth is not None else None if gpu is None else GPUS[gpu]
    if gb_s is None:
        raise ValueError("the estimate needs a memory bandwidth: --gpu H200, or --bandwidth 4800 (GB/s)")
    if gb_s <= 0:
        raise ValueError(f"bandwidth={gb_s:g} GB/s must be above 0")
    shape = roofline(config)
    fetched = shape.union(batch) if union is None else union
    marks = sorted({min(float(m), fetched) for m in sweep(shape, budget)} | {fetched}, reverse=True)
    whole = shape.step_ms(fetched, batch, context, gb_s)
    points = [(m, ms, whole / ms) for m in marks for ms in (shape.step_ms(m, batch, context, gb_s),)]
    gain = whole / shape.step_ms(min(budget, fetched), batch, context, gb_s)
    verdict = judge_shape(shape, batch=batch, union=fetched, budget=budget) or Verdict(
        "cannot tell" if gain >= LEAST_GAIN else "will not help",
        f"at most {gain:.2f} times faster by bytes alone, for {fetched:.1f} experts a layer"
        f"{' if all are equally likely' if union is None else ''}; launches, arithmetic and routing come on top: "
        "measure with --engine vllm",
        gain,
    )
    title = f"estimate by bytes, no measurement: {batch} rows, {context} tokens behind each, {gb_s:,.0f} GB/s"
    return _row(title, shape, "none", batch, budget, fetched, points, verdict, gb_s, "cpu")


def measure(
    model: str,
    config: dict[str, Any],
    engine: str,
    *,
    batch: int,
    budget: int,
    union: float | None,
    data: str | None,
    device: str | None,
    dtype: str | None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Step times on this machine, the line through them, and the verdict."""
    shape = roofline(config)
    union = UNIONS.get(model) if union is None and batch == 16 else union
    early = judge_shape(shape, batch=batch, union=shape.experts if union is None else union, budget=budget)
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    if early is not None:
        return _row("not measured", shape, engine, batch, budget, union, [], early, None, where)
    gb_s = copy_bandwidth(torch.device(where))
    timed = _hf if engine == "hf" else _vllm
    many = {} if steps is None else {"steps": steps}
    times, native = timed(model, sweep(shape, budget), batch, data=data, device=where, dtype=dtype, **many)
    union, line = native if union is None else union, fit(times)
    verdict = judge(line, shape, batch=batch, union=union, budget=budget, gb_s=gb_s)
    points = [(fetched, ms, line.at(union) / ms) for fetched, ms in times]
    sign = "-" if line.b < 0 else "+"
    title = f"{engine}, {batch} rows: {line.a:.3f} ms {sign} {abs(line.b):.4f} ms an expert a layer, R² {line.r2:.3f}"
    row = _row(title, shape, engine, batch, budget, union, points, verdict, gb_s, where)
    return {**row, "a_ms": line.a, "b_ms": line.b, "b_half_ms": line.b_half, "r2": line.r2, "native_union": native}


def _hf(
    model: str,
    budgets: Sequence[int],
    batch: int,
    *,
    data: str | None,
    device: str,
    dtype: str | None,
    steps: int = 8,
) -> tuple[list[tuple[float, float]], float]:
    from moebudget.evaluate.report import read_windows
    from moebudget.integrations.loading import default_dtype, load_model, vocabulary

    assert data is not None
    loaded, tokenizer = load_model(model, device=device, dtype=default_dtype(device) if dtype is None else dtype)
    text = read_windows(data, tokenizer, vocabulary(loaded), PROMPT - 1, batch, tokenizer.eos_token_id)
    if len(text) < batch:
        raise ValueError(f"{data} holds {len(text)} windows of {PROMPT} tokens, {batch} rows need as many")
    return step_times(loaded, text.to(device), budgets, steps)


def _vllm(
    model: str, budgets: Sequence[int], batch: int, *, device: str, steps: int = 128, **_: Any
) -> tuple[list[tuple[float, float]], float]:
    from moebudget.bench.decode import run_decode

    config = read_config(model)
    if "quantization_config" not in config:
        shape = roofline(config)
        whole = shape.other_bytes + shape.layers * shape.experts * shape.expert_bytes
        require_memory(whole, device, f"{model} in bf16")
    rows = run_decode(model, "squared:budget=16", budgets, (batch,), tokens=steps, off=False)
    settings = [row for row in rows if row["bench"] == "decode"]
    return [(row["fetched"], row["tpot_ms"]) for row in settings], settings[0]["native_union"]


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
