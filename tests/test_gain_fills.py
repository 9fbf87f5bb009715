"""Corrected weights and sketches of lost experts, against loops over rows."""

from __future__ import annotations

import math

import pytest
import torch

from moebudget.fill import Backfill, Drop, Fill
from moebudget.gain_fills import ByLayer, EnergyGain, Sketch
from moebudget.types import NO_STATS, Active, LayerStats
from tests import reference
from tests.conftest import make_problem, problems, used_slots
from tests.test_fill import active_of, random_set

few_kinds = pytest.mark.parametrize("kind", ["softmax_renorm", "groups_top2"])


@few_kinds
@pytest.mark.parametrize("cap", [1.1, 100.0])
def test_executed_energy_is_not_the_native_one_or_exceeds_its_cap(kind: str, cap: float) -> None:
    capped = 0
    for problem in problems(kind):
        active = random_set(problem, 3)
        plain, scaled = (f(active, problem.batch, problem.stats) for f in (Backfill(), EnergyGain(cap=cap)))
        assert torch.equal(plain.ids, scaled.ids)
        for t, (row, before, after) in enumerate(
            zip(problem.reference, used_slots(plain), used_slots(scaled), strict=True)
        ):
            energy = energies(problem.batch.hidden[t], problem.stats)
            native = sum(w * w * energy[u] for u, w in row.routes)
            ran = sum(w * w * energy[u] for u, w in before)
            factor = 1.0 if {u for u, _ in before} == set(row.ids) else min(cap, math.sqrt(native / ran))
            capped += factor == cap
            assert [w for _, w in after] == pytest.approx([w * factor for _, w in before], rel=1e-4)
    assert capped > 0 or cap == 100.0


def energies(z: torch.Tensor, stats: LayerStats) -> list[float]:
    a, b = stats["predictor_weight"].double(), stats["predictor_bias"].double()
    return [math.exp(float(a[u] @ z.double() / z.double().norm() + b[u])) for u in range(len(b))]


@few_kinds
@pytest.mark.parametrize(("exponent", "name"), [(0.0, "original"), (0.5, "half"), (1.0, "executed")])
def test_exponent_is_read_for_another_size_of_the_set(kind: str, exponent: float, name: str) -> None:
    for problem in problems(kind):
        n = problem.spec.num_experts
        table = torch.full((n,), 7.0)
        table[2] = exponent  # of a set of three
        active = random_set(problem, 3)
        found = ByLayer()(active, problem.batch, LayerStats({"layer_fill": table}))
        wanted = Backfill(name)(active, problem.batch, NO_STATS)  # type: ignore[arg-type]
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.weights, wanted.weights)


@few_kinds
@pytest.mark.parametrize("fill", [Backfill(), Drop()])
def test_shift_differs_from_the_sketches_of_lost_routes(kind: str, fill: Fill) -> None:
    for problem in problems(kind):
        batch, active = problem.batch, random_set(problem, 3)
        routing, plain = Sketch(fill)(active, batch, problem.stats), fill(active, batch, problem.stats)
        assert torch.equal(routing.ids, plain.ids)
        assert torch.equal(routing.weights, plain.weights)
        assert routing.shift is not None
        read, written = problem.stats["sketch_in"].double(), problem.stats["sketch_out"].double()
        wanted = torch.zeros_like(routing.shift, dtype=torch.float64)
        for t, (row, runs) in enumerate(zip(problem.reference, used_slots(plain), strict=True)):
            x = torch.cat([batch.hidden[t].double(), torch.ones(1, dtype=torch.float64)])
            for u, w in row.routes:
                if u not in {v for v, _ in runs}:
                    wanted[t] += w * written[u].T @ (read[u] @ x)
        torch.testing.assert_close(routing.shift.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fill", [EnergyGain(), ByLayer(), Sketch()])
def test_row_that_keeps_its_routes_is_changed(fill: Fill) -> None:
    problem = make_problem("softmax_renorm", 5, 12, 3)
    kept = problem.reference[2].ids
    routing = fill(active_of(kept, 12), problem.batch, problem.stats)
    assert torch.equal(routing.ids[2], problem.batch.ids[2])
    assert torch.equal(routing.weights[2], problem.batch.weights[2])
    everyone = fill(Active(torch.ones(12, dtype=torch.bool)), problem.batch, problem.stats)
    assert torch.equal(everyone.weights, problem.batch.weights)
    if isinstance(fill, Sketch):
        assert routing.shift is not None
        assert float(routing.shift[2].abs().max()) == 0 < float(routing.shift.abs().max())


def test_row_that_does_not_vote_is_sketched() -> None:
    problem = make_problem("softmax_renorm", 4, 12, 3)
    hidden = problem.hidden.clone()
    hidden[1], hidden[2, 0] = torch.nan, torch.nan
    live = torch.tensor([True, False, True, True])
    batch = problem.spec(hidden, problem.logits, live=live)
    shift = Sketch()(random_set(problem, 3), batch, problem.stats).shift
    assert shift is not None
    assert float(shift[1:3].abs().max()) == 0 < float(shift[[0, 3]].abs().max())


def test_by_layer_reference_is_that_of_the_specification() -> None:
    """The half denominator once more, from plain loops, so that this file does not hold the code against itself."""
    problem = make_problem("softmax_renorm", 6, 12, 3)
    active = random_set(problem, 4)
    stats = LayerStats({"layer_fill": torch.full((12,), 0.5)})
    found = used_slots(ByLayer()(active, problem.batch, stats))
    members = set(active.mask.nonzero()[:, 0].tolist())
    for row, routes in zip(problem.reference, found, strict=True):
        wanted = dict(reference.backfill(problem.spec, row, members, "half"))
        assert dict(routes) == pytest.approx(wanted, rel=1e-5)
