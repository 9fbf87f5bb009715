"""Low-rank sketches: the regression, its best map of a rank, and their effect in a model."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from moebudget import attach, parse
from moebudget.calibrate.sketch import ALPHA, KEPT, SketchSums, sketch
from moebudget.core.stats import Stats, load_stats
from moebudget.core.types import MissingStatisticError
from moebudget.evaluate import evaluate_text
from tests.calibrate.fitted import CASES, built, usual_stats
from tests.engines.transformers import tiny

NAME = "qwen3_moe"
WINDOWS = tiny.prompts(6, 40, seed=5)
BATCH, BUDGET = 3, 3
N = tiny.EXPERTS


@functools.cache
def sketched(rank: int = 2, name: str = NAME) -> Stats:
    return sketch(built(name), usual_stats(name), WINDOWS, budget=BUDGET, rank=rank, batch=BATCH, quiet=True)


def test_full_rank_map_is_weighted_least_squares() -> None:
    g = torch.Generator().manual_seed(0)
    d, n, k, t = 5, 3, 2, 60
    z, y, w = torch.randn(t, d, generator=g), torch.randn(t, k, d, generator=g), torch.rand(t, k, generator=g)
    ids = torch.stack([torch.randperm(n, generator=g)[:k] for _ in range(t)])
    runs = torch.rand(t, k, generator=g) < 0.5
    sums = SketchSums(n, d, "cpu")
    for part in (slice(0, 25), slice(25, t)):
        sums.add(z[part], ids[part], w[part], y[part], runs[part])
    read, written = sums.solve(d)
    for u in range(n):
        rows = [(i, j) for i in range(t) for j in range(k) if int(ids[i, j]) == u]
        x = torch.stack([torch.cat([z[i], torch.ones(1)]) for i, _ in rows]).double()
        target = torch.stack([y[i, j] for i, j in rows]).double()
        c = torch.tensor([float(w[i, j]) ** 2 * (KEPT if runs[i, j] else 1.0) for i, j in rows]).double()[:, None]
        gram = x.T @ (c * x)
        ridge = ALPHA * float(gram.diagonal()[:-1].mean()) * torch.tensor([1.0] * d + [1e-4]).double().diag()
        wanted = torch.linalg.solve(gram + ridge, x.T @ (c * target))
        torch.testing.assert_close((read[u].mT @ written[u]).double(), wanted, rtol=1e-4, atol=1e-5)


def test_map_is_the_best_of_its_rank() -> None:
    g = torch.Generator().manual_seed(1)
    z, y = torch.randn(200, 6, generator=g), torch.randn(200, 1, 6, generator=g)
    y = y * 0.1 + (z * torch.tensor([4.0, 2.0, 1.0, 0.5, 0.2, 0.1]))[:, None]
    sums = SketchSums(1, 6, "cpu")
    sums.add(z, torch.zeros(200, 1, dtype=torch.int64), torch.ones(200, 1), y, torch.zeros(200, 1, dtype=torch.bool))
    full = sums.explained(*sums.solve(6))
    shares = [sums.explained(*sums.solve(r)) for r in (1, 2, 3)]
    assert shares == sorted(shares)
    assert shares[-1] < full
    read, written = sums.solve(2)
    for _ in range(20):
        turn = torch.linalg.qr(torch.randn(6, 2, generator=g)).Q.T[None]
        near = torch.linalg.qr((written[0] + 0.1 * turn[0]).mT).Q.mT[None]
        nearby = near @ (sums.solve(6)[0].mT @ sums.solve(6)[1]).mT  # the full map, read through another pair
        assert sums.explained(nearby, near) < shares[1] + 1e-6
    top = sums.solve(3)
    assert torch.equal(top[0][:, :2], read)
    assert torch.equal(top[1][:, :2], written)


@pytest.mark.parametrize("name", CASES)
def test_sketches_bring_logits_closer_to_native_routing(name: str) -> None:
    """On the text they were fitted on."""
    stats = sketched(8, name)
    assert stats.tensors["sketch_in"].shape[:3] == (len(stats.facts.layers), N, 8)
    outputs = {}
    steps = torch.arange(1, 39)[:, None] + 39 * torch.arange(BATCH)
    for text in ("native", f"base:budget={BUDGET}", f"base:budget={BUDGET},fill=sketch"):
        with attach(built(name), text, stats) as run, run.decode_steps(steps), torch.no_grad():
            outputs[text] = built(name)(input_ids=WINDOWS[:BATCH, :-1], use_cache=False).logits[:, 1:]
    native, plain, filled = outputs.values()
    assert float((filled - native).square().sum()) < 0.95 * float((plain - native).square().sum())


def test_saved_sketches_load_and_leave_complete_rows_native(tmp_path: Path) -> None:
    sketched().save(tmp_path / "stats.safetensors")
    stats = load_stats(tmp_path / "stats.safetensors")
    policies = [parse("base:budget=12,fill=sketch"), parse("native")]
    sketched_result, native = evaluate_text(built(NAME), policies, stats, WINDOWS, batch=BATCH, quiet=True)
    assert torch.equal(sketched_result.nll, native.nll)
    assert stats.info["sketch"]["rank"] == 2
    assert all(0 < share < 1 for share in stats.info["sketch"]["explained_where_fitted"])


def test_group_size_does_not_change_sketches() -> None:
    grouped = sketch(
        built(NAME), usual_stats(NAME), WINDOWS, budget=BUDGET, rank=2, batch=BATCH, group=1, quiet=True
    ).tensors
    for name in ("sketch_in", "sketch_out"):
        assert torch.equal(grouped[name], sketched().tensors[name])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": 0}, "rank=0 must be between 1 and the model's hidden size of"),
        ({"budget": N}, "budget=12 must be between 1 and 11, or nothing is left out"),
        ({"batch": 7}, "6 windows of text for a batch of 7: give more text or a smaller batch"),
        ({"group": 0}, "group=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sketch(built(NAME), usual_stats(NAME), WINDOWS, **{"batch": BATCH, "budget": BUDGET, **settings})


def test_missing_sketch_names_the_command_that_makes_it() -> None:
    with (
        pytest.raises(MissingStatisticError, match=r"'sketch_in'.*moebudget sketch MODEL"),
        attach(built(NAME), "base:budget=3,fill=sketch", usual_stats(NAME)),
    ):
        pass
