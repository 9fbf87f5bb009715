from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget.calibrate.collect import PRIOR_TOKENS, LayerSums, solve_ridge, unit

EXPERTS, HIDDEN, OUT = 5, 6, 4
ALPHAS = [1e-4, 1e-2, 1.0, 100.0]


@dataclass(frozen=True)
class Routes:
    """Routed tokens of one layer."""

    hidden: Tensor  # [T, d]
    ids: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    outputs: Tensor  # [T, K, OUT]

    def part(self, rows: slice) -> Routes:
        return Routes(self.hidden[rows], self.ids[rows], self.weights[rows], self.outputs[rows])

    def samples(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, d], energy [n], w [n] of one expert, float64, token by token."""
        samples = []
        for z, ids, weights, outputs in zip(
            self.hidden.double(), self.ids.tolist(), self.weights.double(), self.outputs.double(), strict=True
        ):
            for k, u in enumerate(ids):
                if u == expert:
                    samples.append((z / z.norm() if z.any() else z, outputs[k] @ outputs[k], weights[k]))
        x = torch.stack([s[0] for s in samples]) if samples else torch.zeros(0, self.hidden.shape[1]).double()
        return x, *(torch.tensor([float(s[i]) for s in samples], dtype=torch.float64) for i in (1, 2))


def make_routes(tokens: int = 300, seed: int = 0, common: float = 0.0, **only: int) -> Routes:
    """Random routes to two experts per token; `common` shifts all hidden states the same way, in units of their norms.

    `expert{i}` is the maximum number of tokens of expert i.
    """
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=g) * torch.rand(tokens, 1, generator=g) * 30
    hidden = hidden + common * hidden.norm(dim=-1, keepdim=True) * torch.linspace(-1, 2, HIDDEN) / HIDDEN**0.5
    chances = torch.ones(EXPERTS)
    ids = torch.empty(tokens, 2, dtype=torch.int64)
    for t in range(tokens):
        ids[t] = torch.multinomial(chances, 2, generator=g)
        for u in ids[t].tolist():
            if f"expert{u}" in only:
                only[f"expert{u}"] -= 1
        chances = torch.tensor([float(only.get(f"expert{u}", 1) > 0) for u in range(EXPERTS)])
    outputs = torch.randn(tokens, 2, OUT, generator=g) * (0.5 * hidden[:, None, :OUT].abs() + 0.1)
    return Routes(hidden, ids, torch.rand(tokens, 2, generator=g), outputs)


def sums_of(*routes: Routes) -> LayerSums:
    sums = LayerSums(EXPERTS, HIDDEN, "cpu")
    for part in routes:
        sums.add(part.hidden, part.ids, part.weights, part.outputs)
    return sums


def direct_ridge(x: Tensor, y: Tensor, alpha: float, towards: Tensor | None = None) -> tuple[Tensor, float]:
    """min |X a + b - y|^2 + lam |a - towards|^2 with the intercept as a column without a penalty, by least squares."""
    n, d = x.shape
    centred = x - x.mean(0)
    lam = max(alpha * float(centred.square().sum()) / d, 0.0)
    towards = torch.zeros(d).double() if towards is None else towards
    design = torch.cat([x, torch.ones(n, 1).double()], 1)
    penalty = torch.cat([math.sqrt(lam) * torch.eye(d).double(), torch.zeros(d, 1).double()], 1)
    target = torch.cat([y, math.sqrt(lam) * towards])
    solution = torch.linalg.lstsq(torch.cat([design, penalty]), target, driver="gelsd").solution
    return solution[:-1], float(solution[-1])


def pooled_ridge(routes: Routes, alpha: float) -> tuple[Tensor, float]:
    samples = [routes.samples(u) for u in range(EXPERTS)]
    return direct_ridge(torch.cat([s[0] for s in samples]), torch.cat([s[1] for s in samples]).log(), alpha)


def assert_near(actual: Tensor | float, wanted: Tensor | float, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(wanted), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batches", [1, 3, 7])
def test_streamed_sums_equal_sums_over_single_tokens(batches: int) -> None:
    routes = make_routes(expert3=2)
    size = math.ceil(len(routes.ids) / batches)
    sums = sums_of(*(routes.part(slice(i, i + size)) for i in range(0, len(routes.ids), size)))
    for u in range(EXPERTS):
        x, e, w = routes.samples(u)
        y = e.log()
        wanted: dict[str, Any] = {
            "n": float(len(x)), "sy": y.sum(), "syy": (y * y).sum(), "se": e.sum(), "sw": w.sum(),
            "swn": (w * e.sqrt()).sum(), "sx": x.sum(0), "sxy": (x * y[:, None]).sum(0),
        }  # fmt: skip
        for name, value in wanted.items():
            torch.testing.assert_close(
                getattr(sums, name)[u], torch.as_tensor(value).double(), rtol=1e-6, atol=1e-5, msg=f"{name} of {u}"
            )
        centred = x - x.mean(0)
        assert_near(sums.centred_gram(slice(u, u + 1))[0], centred.T @ centred, 1e-5)
    assert sums.n[3] == 2


def test_expert_first_routed_to_in_a_later_batch_is_summed_correctly() -> None:
    routes = make_routes()
    early = (routes.ids != 4).all(-1)
    first, later = (
        Routes(routes.hidden[m], routes.ids[m], routes.weights[m], routes.outputs[m]) for m in (early, ~early)
    )
    streamed, at_once = (solve_ridge(s, [1e-2]) for s in (sums_of(first, later), sums_of(routes)))
    assert_near(streamed[0], at_once[0], 1e-5)
    assert_near(streamed[1], at_once[1], 1e-5)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_ridge_penalises_slopes_but_not_the_intercept(alpha: float) -> None:
    routes = make_routes()
    slopes, biases = solve_ridge(sums_of(routes), [0.5, alpha])
    for u in range(EXPERTS):
        x, e, _ = routes.samples(u)
        slope, bias = direct_ridge(x, e.log(), alpha)
        assert_near(slopes[1, u], slope)
        assert_near(float(biases[1, u]), bias)


def test_large_common_direction_does_not_change_slopes() -> None:
    """Hidden states after a norm share most of their direction; slopes only use the differences."""
    routes = make_routes(common=300.0)
    slopes, biases = solve_ridge(sums_of(routes), [1e-2])
    for u in range(EXPERTS):
        _, e, _ = routes.samples(u)
        x = unit(routes.hidden)[(routes.ids == u).any(-1)].double()  # the float32 numbers that are summed
        slope, bias = direct_ridge(x, e.log(), 1e-2)
        scale = float(slope.abs().max())
        assert_near(slopes[0, u] / scale, slope / scale, 1e-3)
        assert_near(float(biases[0, u]) / scale, bias / scale, 1e-3)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("tokens", [2, HIDDEN - 1])
def test_expert_with_few_tokens_is_shrunk_towards_the_pooled_regression(alpha: float, tokens: int) -> None:
    routes = make_routes(expert3=tokens)
    x, e, _ = routes.samples(3)
    y = e.log()
    assert len(x) == tokens
    pooled_slope, pooled_bias = pooled_ridge(routes, alpha)
    slope, _ = direct_ridge(x, y, alpha, pooled_slope)
    expected = float(x.mean(0) @ pooled_slope) + pooled_bias
    mean = expected + (float(y.mean()) - expected) * tokens / (tokens + PRIOR_TOKENS)
    slopes, biases = solve_ridge(sums_of(routes), [alpha])
    rounding = max(1e-6, 1e-6 / alpha)  # of x in float32, against lam in the directions without data
    assert_near(slopes[0, 3], slope, rounding)
    assert_near(float(biases[0, 3]), mean - float(slope @ x.mean(0)), rounding)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_expert_without_tokens_gets_the_pooled_regression(alpha: float) -> None:
    routes = make_routes(expert3=1, expert4=40)
    moved = routes.ids.clone()
    moved[moved == 3] = 4  # nothing is left for expert 3
    routes = Routes(routes.hidden, moved, routes.weights, routes.outputs)
    slopes, biases = solve_ridge(sums_of(routes), [alpha])
    pooled_slope, pooled_bias = pooled_ridge(routes, alpha)
    assert_near(slopes[0, 3], pooled_slope)
    assert_near(float(biases[0, 3]), pooled_bias)


@pytest.mark.parametrize("copies", [1, 3, 500])
@pytest.mark.parametrize("hidden", [8, 64])
def test_regression_is_solvable_for_one_token_or_equal_tokens(copies: int, hidden: int) -> None:
    """The centred Gram matrix of such an expert is 0; rounding must not make it indefinite."""
    g = torch.Generator().manual_seed(0)
    sums = LayerSums(2, hidden, "cpu")
    z, ids = torch.randn(400, hidden, generator=g), torch.zeros(400, 1, dtype=torch.int64)
    direction = torch.randn(hidden, generator=g)
    energy = (unit(z) @ direction).exp()
    sums.add(z, ids, torch.ones(400, 1), energy.sqrt()[:, None, None])
    for _ in range(2):
        sums.add(
            z[:1].repeat(copies, 1), ids[:1].repeat(copies, 1) + 1, torch.ones(copies, 1), torch.ones(copies, 1, 1)
        )
    slopes, biases = solve_ridge(sums, [1e-4, 1e-2, 1.0])
    assert slopes.isfinite().all()
    assert biases.isfinite().all()
    if 2 * copies < hidden:
        pooled_norm = slopes[:, 0].norm(dim=-1)
        assert ((slopes[:, 1] - slopes[:, 0]).norm(dim=-1) < 0.2 * pooled_norm).all()
    else:
        guess = slopes[:, 1] @ unit(z[:1])[0].double() + biases[:, 1]  # all its tokens have log energy 0
        assert_near(guess, torch.zeros(3).double(), 1e-3)


@pytest.mark.parametrize("chunk_bytes", [1, 8 * HIDDEN * HIDDEN * 5 * 2, 2**30])
def test_solution_does_not_depend_on_chunk_size(chunk_bytes: int) -> None:
    sums = sums_of(make_routes(expert3=2))
    chunked, whole = solve_ridge(sums, [1e-3, 1e-1, 1.0], chunk_bytes), solve_ridge(sums, [1e-3, 1e-1, 1.0])
    assert chunked[0].shape == (3, EXPERTS, HIDDEN)
    assert_near(chunked[0], whole[0], 1e-10)
    assert_near(chunked[1], whole[1], 1e-10)


def test_zero_hidden_states_and_zero_outputs_stay_finite() -> None:
    routes = make_routes()
    hidden, outputs = routes.hidden.clone(), routes.outputs.clone()
    hidden[::7], outputs[::5] = 0.0, 0.0
    sums = sums_of(Routes(hidden, routes.ids, routes.weights, outputs))
    slopes, biases = solve_ridge(sums, ALPHAS)
    for tensor in (slopes, biases, sums.sy, sums.sxy, sums.swn):
        assert tensor.isfinite().all()
    assert unit(torch.zeros(2, 3)).eq(0).all()


def test_layer_without_tokens_gets_zero_slopes_and_biases() -> None:
    slopes, biases = solve_ridge(LayerSums(EXPERTS, HIDDEN, "cpu"), ALPHAS)
    assert slopes.eq(0).all()
    assert biases.eq(0).all()


def test_log_linear_energies_are_predicted() -> None:
    """BASE's model of the energies, planted: log |E_u(z)|^2 = a_u . z/|z| + b_u + noise."""
    g = torch.Generator().manual_seed(1)
    slope, bias = 2 * torch.randn(EXPERTS, HIDDEN, generator=g), torch.randn(EXPERTS, generator=g)
    sums = LayerSums(EXPERTS, HIDDEN, "cpu")
    x_new, y_new, ids_new = torch.empty(0), torch.empty(0), torch.empty(0)
    for part in ("fit", "new"):
        hidden = torch.randn(1000, HIDDEN, generator=g) * torch.rand(1000, 1, generator=g)
        ids = torch.rand(1000, EXPERTS, generator=g).argsort(-1)[:, :2]
        y = (unit(hidden) @ slope.T + bias).gather(-1, ids) + 0.05 * torch.randn(1000, 2, generator=g)
        direction = torch.nn.functional.normalize(torch.randn(1000, 2, OUT, generator=g), dim=-1)
        if part == "fit":
            sums.add(hidden, ids, torch.rand(1000, 2, generator=g), (y / 2).exp()[..., None] * direction)
        else:
            x_new, y_new, ids_new = unit(hidden).double(), y.double(), ids
    a, b = (s[0] for s in solve_ridge(sums, [1e-4]))
    guess = (x_new @ a.T + b).gather(-1, ids_new)
    for u in range(EXPERTS):
        y, error = y_new[ids_new == u], (guess - y_new)[ids_new == u]
        assert 1 - error.square().sum() / (y - y.mean()).square().sum() > 0.99
    assert_near(a.float(), slope, 0.1)


def test_size_in_bytes_equals_memory_of_the_sums() -> None:
    sums = LayerSums(EXPERTS, HIDDEN, "cpu")
    tensors = [t for t in vars(sums).values() if isinstance(t, Tensor)]
    assert LayerSums.size_in_bytes(EXPERTS, HIDDEN) == sum(t.numel() * t.element_size() for t in tensors)
