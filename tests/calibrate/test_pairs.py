"""Statistics of published methods against loops over single tokens and experts."""

from __future__ import annotations

import statistics
import types
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget.calibrate.pairs import SIMILARITY_TOKENS, Folding, RouteRatios, Similarity
from moebudget.calibrate.run import KNOWN, super_experts
from moebudget.methods.registry import parse, parse_many
from tests.calibrate import reference
from tests.calibrate.fitted import CASES, built, fit
from tests.engines.transformers import tiny

over_models = pytest.mark.parametrize("name", CASES)
METRICS = frozenset({"frobenius", "cosine", "cka"})


def outputs_of(name: str) -> tuple[Any, list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Per layer: ids and weights [T, K] without padding, all experts' outputs [T, N, d] and hidden states, float64."""
    model, corpus = built(name), reference.make_corpus()
    mask, layers = corpus.fit.mask, []
    for module, layer in zip(
        tiny.experts_modules(model), reference.layers_of(model, corpus.fit.ids, mask), strict=True
    ):
        experts = types.SimpleNamespace(**{key: p.detach().double() for key, p in module.named_parameters()})
        z = layer.hidden[mask]
        every = torch.stack([torch.stack([tiny.expert_alone(experts, x, u) for u in range(tiny.EXPERTS)]) for x in z])
        layers.append((layer.ids[mask], layer.weights[mask], every, z))
    return model, layers


def cosine(x: Tensor, y: Tensor) -> float:
    return float(x @ y / (x.norm() * y.norm()))


@over_models
def test_statistics_equal_loops_over_tokens_and_experts(name: str) -> None:
    model, layers = outputs_of(name)
    stats = fit(model, reference.make_corpus(), needs=KNOWN)
    for position, (ids, weights, every, _) in enumerate(layers):
        fitted = {key: tensor[position].double() for key, tensor in stats.tensors.items()}
        ratios: dict[int, list[float]] = defaultdict(list)
        norms: dict[int, list[float]] = defaultdict(list)
        directions: dict[int, list[Tensor]] = defaultdict(list)
        sums: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for t, (chosen, w) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            for j, x in enumerate(sorted(w, reverse=True)):
                ratios[j].append(x / max(w))
            for u in chosen:
                norms[u].append(float(every[t, u].norm()))
                directions[u].append(every[t, u] / every[t, u].norm())
                for v in chosen:
                    omega, x, y = float(every[t, u].norm()), every[t, u], every[t, v]
                    for i, value in enumerate((x @ y, y @ y, x @ x)):
                        sums[u, v][i] += omega * float(value)
        for j, values in ratios.items():
            assert float(fitted["route_ratio"][j]) == pytest.approx(statistics.median_low(values), abs=2e-4)
        seen = sorted(sum(n) / len(n) for n in norms.values())
        for u in range(tiny.EXPERTS):
            wanted = sum(norms[u]) / len(norms[u]) if norms[u] else seen[(len(seen) - 1) // 2]
            assert float(fitted["output_norm"][u]) == pytest.approx(wanted, rel=1e-5)
            mean = sum(directions[u]) / len(directions[u]) if directions[u] else torch.zeros(every.shape[-1])
            torch.testing.assert_close(fitted["output_direction"][u], mean.double(), rtol=0, atol=1e-5)
            for v in range(tiny.EXPERTS):
                uv, vv, uu = sums[u, v]
                scale = max(-4.0, min(4.0, uv / (vv + 1e-3)))
                loss = (uu - 2 * scale * uv + scale**2 * vv) / uu if uu else 1e30
                scale, loss = (1.0, 1e30) if u == v else (scale if uu else 0.0, loss)
                assert float(fitted["fold_scale"][u, v]) == pytest.approx(scale, rel=1e-4, abs=1e-5), (u, v)
                assert float(fitted["fold_loss"][u, v]) == pytest.approx(loss, rel=1e-4), (u, v)
        check_similarities(fitted, every)


def check_similarities(fitted: dict[str, Tensor], every: Tensor) -> None:
    experts = range(tiny.EXPERTS)
    distance = {(u, v): float((every[:, u] - every[:, v]).norm()) for u in experts for v in experts}
    most = max(distance.values())
    centred = every - every.mean(0)
    for u in experts:
        for v in experts:
            x, y = centred[:, u], centred[:, v]
            cka = float((x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))
            direct = {
                "frobenius": 1 - distance[u, v] / most,
                "cosine": (sum(cosine(a, b) for a, b in zip(every[:, u], every[:, v], strict=True)) / len(every) + 1)
                / 2,
                "cka": cka,
            }
            for metric, value in direct.items():
                assert float(fitted[f"similarity_{metric}"][u, v]) == pytest.approx(value, abs=2e-4), (metric, u, v)


def test_residual_loss_of_a_folded_pair_is_the_squared_sine() -> None:
    """At the optimum the relative residual is 1 - cos^2, here for one token and two experts at 60 degrees."""
    folding = Folding(2, "cpu")
    x = 30 * torch.tensor([[[1.0, 0.0], [0.5, 3**0.5 / 2]]])
    folding.add(None, x, torch.tensor([[0, 1]]), torch.ones(1, 2), x)  # type: ignore[arg-type]
    tensors = folding.finish()
    assert float(tensors["fold_loss"][0, 1]) == pytest.approx(0.75, abs=1e-5)
    assert float(tensors["fold_scale"][0, 1]) == pytest.approx(0.5, abs=1e-5)


def test_scalar_is_clipped_to_four_and_its_loss_follows() -> None:
    folding = Folding(2, "cpu")
    x = torch.tensor([[[100.0, 0.0], [10.0, 0.0]]])
    folding.add(None, x, torch.tensor([[0, 1]]), torch.ones(1, 2), x)  # type: ignore[arg-type]
    tensors = folding.finish()
    assert float(tensors["fold_scale"][0, 1]) == 4.0
    assert float(tensors["fold_loss"][0, 1]) == pytest.approx(0.36)  # (100 - 40)^2 / 100^2


class Outputs:
    """An expert layer whose outputs are random."""

    def __init__(self) -> None:
        self.tokens, self.generator = 0, torch.Generator().manual_seed(0)

    def route_outputs(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self.tokens += len(hidden)
        return torch.randn(*ids.shape, 4, generator=self.generator)


def test_similarity_stops_at_its_token_limit() -> None:
    layer, similarity = Outputs(), Similarity(3, METRICS, "cpu")
    nothing = torch.empty(0)
    for rows in (SIMILARITY_TOKENS - 100, 200, 50):
        similarity.add(layer, torch.randn(rows, 4), nothing, nothing, nothing)  # type: ignore[arg-type]
    assert layer.tokens == similarity.tokens == SIMILARITY_TOKENS
    assert sum(part.shape[1] for part in similarity.sample) == 1024


def test_route_ratio_handles_no_tokens_and_equal_weights() -> None:
    ratios = RouteRatios(3, "cpu")
    assert ratios.finish()["route_ratio"].shape == (3,)
    weights = torch.tensor([[0.5, 0.5, 0.25], [0.25, 0.5, 0.5]])
    ratios.add(None, weights, weights.long(), weights, weights)  # type: ignore[arg-type]
    assert ratios.finish()["route_ratio"].tolist() == [1.0, 1.0, 0.5]


def test_super_experts_are_in_early_layers_and_above_a_tenth_of_the_largest() -> None:
    peak = torch.rand(8, 100)
    peak[2, 7], peak[7, 3], peak[1, 1] = 1000.0, 1000.0, 99.0
    flags = super_experts(peak)
    assert flags.nonzero().tolist() == [[2, 7]]


def test_only_needed_statistics_are_collected() -> None:
    corpus = reference.make_corpus()
    needs = frozenset().union(*(p.needs for p in parse_many(["sere,exfold", "skip"])))
    stats = fit(built("qwen3_moe"), corpus, needs=needs)
    assert needs <= set(stats.tensors)
    assert not {"predictor_weight", "nonlinear_weight", "similarity_cka"} & set(stats.tensors)
    assert "alpha" not in stats.info
    for policy in ("sere:s=1", "exfold:budget=3", "skip"):
        stats.check(stats.facts, parse(policy).needs)


def test_statistic_that_calibration_does_not_make_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not make \['placement_device'\]; it makes .*fold_loss"):
        fit(built("qwen3_moe"), reference.make_corpus(), needs={"placement_device", "energy_mean"})


@over_models
def test_nonlinear_predictor_is_the_ridge_on_its_features(name: str) -> None:
    """Against the closed form on all rows at once, in float64."""
    model, layers = outputs_of(name)
    stats = fit(model, reference.make_corpus(), needs=KNOWN, alphas=(0.1,))
    for position, (ids, _, every, z) in enumerate(layers):
        features = stats.tensors["nonlinear_features"][position].double()
        direction = z / z.norm(dim=-1, keepdim=True)
        x = torch.cat([direction, (direction @ features.T).clamp_min(0)], -1)
        for u in range(tiny.EXPERTS):
            rows = (ids == u).any(-1)
            if rows.sum() < x.shape[1]:
                continue  # shrunk towards the pooled fit, tested with the linear predictor
            y = every[rows, u].square().sum(-1).log()
            mean, target = x[rows].mean(0), y.mean()
            centred = x[rows] - mean
            gram = centred.T @ centred
            lam = 0.1 * gram.diagonal().sum() / len(gram)
            slope = torch.linalg.solve(gram + lam * torch.eye(len(gram)).double(), centred.T @ (y - target))
            torch.testing.assert_close(
                stats.tensors["nonlinear_weight"][position, u].double(), slope, rtol=1e-2, atol=1e-3
            )
    assert stats.info["nonlinear"]["retained_energy"] > 0.5
    assert stats.tensors["nonlinear_features"].shape[1:] == (256, layers[0][3].shape[-1])
