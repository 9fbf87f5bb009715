"""The geometry study against loops, brute force and the paper's identity."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from torch import Tensor

from moebudget.analyse import geometry
from moebudget.analyse.geometry import error_ratio
from tests.calibrate import reference
from tests.calibrate.fitted import built
from tests.engines.transformers import tiny

WINDOWS, BATCH, BUDGET = tiny.prompts(6, 8, seed=4), 3, 4
SETTING = {"batch": BATCH, "budget": BUDGET}


def vectors(name: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per layer ids, weights [B, S, K] and unweighted outputs [B, S, K, d] of native routing."""
    model, ids, layers = built(name), WINDOWS[:, :-1], []
    for module, layer in zip(tiny.experts_modules(model), reference.layers_of(model, ids), strict=True):
        experts = types.SimpleNamespace(**{key: p.detach().double() for key, p in module.named_parameters()})
        z = layer.hidden.flatten(0, 1)
        rows = [
            [tiny.expert_alone(experts, x, u) for u in r]
            for x, r in zip(z, layer.ids.flatten(0, 1).tolist(), strict=True)
        ]
        out = torch.stack([torch.stack(r) for r in rows]).view(*layer.ids.shape, -1)
        layers.append((layer.ids, layer.weights, out))
    return layers


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_study_equals_loops(name: str) -> None:
    result = geometry(built(name), WINDOWS, **SETTING)
    cosine, weight, rho, size = 0.0, 0.0, dict[int, list[float]](), dict[int, list[float]]()
    for ids, weights, out in vectors(name):
        for group, s in itertools.product(range(2), range(ids.shape[1])):
            rows = range(group * BATCH, (group + 1) * BATCH)
            first = {int(ids[b, s, int(weights[b, s].argmax())]) for b in rows}
            if name == "deepseek_v3":  # its bias ranks, so the first route need not be the heaviest
                first = {int(ids[b, s, 0]) for b in rows}
            for b in rows:
                a = out[b, s] * weights[b, s, :, None]
                for i, j in itertools.combinations(range(tiny.TOP_K), 2):
                    c = float(out[b, s, i] @ out[b, s, j] / (out[b, s, i].norm() * out[b, s, j].norm()))
                    w = float(weights[b, s, i] * weights[b, s, j])
                    cosine, weight = cosine + abs(c) * w, weight + w
                lost = [i for i in range(tiny.TOP_K) if int(ids[b, s, i]) not in first]
                if lost:
                    energy = float(a[lost].square().sum())
                    rho.setdefault(len(lost), []).append(float(a[lost].sum(0).square().sum()) / energy)
                    size.setdefault(len(lost), []).append(float(a[lost].norm(dim=-1).sum() ** 2) / energy)
    assert result.cosine_abs == pytest.approx(cosine / weight, rel=1e-4)
    assert {k: n for k, n, _, _ in result.omitted} == {k: len(v) for k, v in rho.items()}
    for k, _, mean_rho, mean_size in result.omitted:
        assert mean_rho == pytest.approx(sum(rho[k]) / len(rho[k]), rel=1e-4)
        assert mean_size == pytest.approx(sum(size[k]) / len(size[k]), rel=1e-4)
    assert result.identity_error < 1e-9
    assert sum(result.cosine_histogram) == pytest.approx(1)
    assert result.tokens == 6 * 7


def exact_error(ids: Tensor, a: Tensor, active: set[int]) -> float:
    """sum_t |sum_{u in R_t outside A} a_tu|^2 of one step: ids [B, K], a [B, K, d]."""
    total = 0.0
    for chosen, vectors_ in zip(ids.tolist(), a, strict=True):
        out = [v for u, v in zip(chosen, vectors_, strict=True) if u not in active]
        total += float(torch.stack(out).sum(0).square().sum()) if out else 0.0
    return total


def test_sets_are_those_of_the_largest_energies_and_of_greedy_addition() -> None:
    g = torch.Generator().manual_seed(0)
    experts, rows, k, steps = 9, 5, 3, 20
    ids = torch.stack(
        [torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(rows)]) for _ in range(steps)]
    )
    # Two common directions, so that the cross terms matter.
    a = (torch.randn(steps, rows, k, 4, generator=g) + 2 * torch.tensor([1.0, 1, 0, 0])).double()
    ratios = error_ratio(ids, a @ a.mT, experts, BUDGET)
    assert len({round(float(x), 6) for x in ratios}) > 5
    for s in range(steps):
        energy = [0.0] * experts
        for chosen, out in zip(ids[s].tolist(), a[s], strict=True):
            for u, v in zip(chosen, out, strict=True):
                energy[u] += float(v.square().sum())
        additive = set(sorted(range(experts), key=lambda u: (-energy[u], u))[:BUDGET])
        greedy: set[int] = set()
        for _ in range(BUDGET):
            greedy.add(min(set(range(experts)) - greedy, key=lambda u: (exact_error(ids[s], a[s], greedy | {u}), u)))
        wanted = exact_error(ids[s], a[s], additive) / exact_error(ids[s], a[s], greedy)
        assert float(ratios[s]) == pytest.approx(wanted, rel=1e-9)


def test_ratio_is_one_if_nothing_is_left_out() -> None:
    ids = torch.tensor([[[0, 1], [1, 2]]])
    a = torch.randn(1, 2, 2, 3).double()
    assert error_ratio(ids, a @ a.mT, 3, 3).tolist() == [1.0]


def test_fit_finds_the_cosine_of_experts_with_a_common_direction() -> None:
    """Outputs with the same cosine everywhere: cbar is that cosine and the fit is exact."""
    model = tiny.build(tiny.available("qwen3_moe"), hidden_size=64)
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(64, 64, generator=g)).Q
    cosine = 0.3
    direction = cosine**0.5 * basis[-1] + (1 - cosine) ** 0.5 * basis[: tiny.EXPERTS]

    def planted(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        length = hidden[:, :1].abs() + 1
        return torch.einsum("tk,tkd->td", weights * length, direction[ids])

    kind = type(tiny.experts_modules(model)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", lambda _self, hidden, ids, weights: planted(hidden, ids, weights))
        result = geometry(model, tiny.prompts(40, 30, seed=1), batch=4, budget=4)
    assert result.cosine_abs == pytest.approx(cosine, abs=1e-4)
    assert result.cbar == pytest.approx(cosine, abs=1e-4)
    assert result.fit_error < 1e-4


@pytest.mark.parametrize(("settings", "says"), [({"batch": 7}, "6 windows are fewer"), ({"budget": 0}, "budget=0")])
def test_impossible_setting_is_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        geometry(built("qwen3_moe"), WINDOWS, **{**SETTING, **settings})
