from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget import attach, load_stats
from moebudget.calibrate import Corpus, run
from moebudget.calibrate.collect import LayerSums, solve_ridge
from moebudget.calibrate.run import layers_per_pass
from moebudget.core.stats import ModelFacts, Stats
from tests.calibrate import reference
from tests.calibrate.fitted import ALPHAS, BATCH, BUDGET, CASES, built, fit, usual_stats
from tests.engines.transformers import tiny

over_models = pytest.mark.parametrize("name", CASES)


def assert_same(actual: Stats, expected: Stats, tolerance: float = 0.0) -> None:
    assert actual.facts == expected.facts
    assert set(actual.tensors) == set(expected.tensors)
    for key, tensor in actual.tensors.items():
        torch.testing.assert_close(
            tensor,
            expected.tensors[key],
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m, k=key: f"{k}: {m}",
        )


def count_expert_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Layer -> number of (token, expert) pairs of every call of the forward of its experts."""
    modules = tiny.experts_modules(model)
    forward: Callable[..., Tensor] = type(modules[0]).forward
    counts: dict[int, list[int]] = defaultdict(list)

    @functools.wraps(forward)
    def counted(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        counts[modules.index(self)].append(ids.numel())
        return forward(self, hidden, ids, weights)

    monkeypatch.setattr(type(modules[0]), "forward", counted)
    return counts


@over_models
def test_statistics_are_means_over_routed_tokens(name: str) -> None:
    corpus, stats = reference.make_corpus(), usual_stats(name)
    layers = reference.layers_of(built(name), corpus.fit.ids, corpus.fit.mask)
    assert len(layers) == len(stats.facts.layers) == 2
    assert stats.tensors["count"].sum() == 2 * tiny.TOP_K * corpus.fit.tokens
    for position, layer in enumerate(layers):
        routes: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row, s in corpus.fit.mask.nonzero().tolist():
            for u, w, e in layer.routes(row, s):
                routes[u].append((w, e))
        for u in range(tiny.EXPERTS):
            n = len(routes[u])
            wanted = {
                "count": n,
                "energy_mean": sum(e for _, e in routes[u]) / max(n, 1),
                "weight_mean": sum(w for w, _ in routes[u]) / max(n, 1),
                "output_norm_weighted": sum(w * e**0.5 for w, e in routes[u]) / max(n, 1),
            }
            for key, value in wanted.items():
                assert float(stats.tensors[key][position, u]) == pytest.approx(value, rel=1e-4), (key, position, u)


@over_models
def test_predictor_is_the_ridge_regression_on_the_router_input(name: str) -> None:
    corpus, stats = reference.make_corpus(), usual_stats(name)
    mask = corpus.fit.mask
    for position, layer in enumerate(reference.layers_of(built(name), corpus.fit.ids, mask)):
        sums = LayerSums(tiny.EXPERTS, layer.hidden.shape[-1], "cpu")
        root = layer.energy.sqrt()[..., None]
        sums.add(layer.hidden[mask].float(), layer.ids[mask], layer.weights[mask], root[mask])
        slope, bias = solve_ridge(sums, [stats.info["alpha"]])
        torch.testing.assert_close(stats.tensors["predictor_weight"][position], slope[0].float(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(stats.tensors["predictor_bias"][position], bias[0].float(), rtol=1e-3, atol=1e-3)


@over_models
def test_padding_does_not_change_statistics(name: str) -> None:
    poisoned = fit(built(name), reference.make_corpus(poison=1))
    assert_same(usual_stats(name), poisoned, 1e-5)
    assert usual_stats(name).info == poisoned.info


def test_same_padding_without_a_mask_changes_statistics() -> None:
    """Control for the test above: without the mask, the same padding counts."""
    corpus = reference.make_corpus(poison=1)
    for part in (corpus.fit, corpus.held_out):
        part.mask.fill_(True)
    stats = fit(built("qwen3_moe"), corpus)
    usual = usual_stats("qwen3_moe")
    assert stats.tensors["count"].sum() > usual.tensors["count"].sum()
    assert not torch.allclose(stats.tensors["energy_mean"], usual.tensors["energy_mean"], rtol=1e-3)
    assert stats.info["retained_energy_by_alpha"] != usual.info["retained_energy_by_alpha"]


@over_models
def test_group_size_does_not_change_statistics(name: str) -> None:
    single, both = (fit(built(name), reference.make_corpus(), group=group) for group in (1, 2))
    assert_same(single, both, 1e-4)
    assert_same(both, usual_stats(name))  # by default, as many layers as fit into memory: both


@pytest.mark.parametrize("group", [1, 2])
def test_experts_run_once_per_token_and_passes_end_at_their_last_layer(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    model, corpus = tiny.build(tiny.available("qwen3_moe")), reference.make_corpus()
    counts = count_expert_rows(model, monkeypatch)
    fit(model, corpus, group=group)
    fit_pairs, held_out_pairs = (tiny.TOP_K * part.ids.numel() for part in (corpus.fit, corpus.held_out))
    passes = {1: (2, 1), 2: (1, 1)}[group]  # the first layer also runs in the pass of the second
    for layer, times in enumerate(passes):
        assert sum(counts[layer]) == times * fit_pairs + held_out_pairs


def test_model_is_restored() -> None:
    model = tiny.build(tiny.available("qwen3_moe"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit(model, reference.make_corpus(), group=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in tiny.experts_modules(model))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def retained_by_loops(name: str, stats: Stats, corpus: Corpus) -> float:
    """Mean over layers, positions and batches; a decode batch is BATCH sequences at one position."""
    shares, part = [], corpus.held_out
    layers = reference.layers_of(built(name), part.ids, part.mask)
    for position, layer in enumerate(layers):
        a, b = stats.tensors["predictor_weight"][position], stats.tensors["predictor_bias"][position]
        for start in range(0, len(part.ids), BATCH):
            rows = range(start, min(start + BATCH, len(part.ids)))
            for s in range(part.ids.shape[1]):
                true = reference.removal_costs(layer, rows, s, part.mask)
                if true:
                    chosen = reference.best(reference.predicted_costs(layer, rows, s, a, b, part.mask), BUDGET)
                    shares.append(reference.retained(true, chosen))
    return sum(shares) / len(shares)


@over_models
def test_retained_energy_follows_its_definition_and_chooses_alpha(name: str) -> None:
    corpus, stats = reference.make_corpus(), usual_stats(name)
    singles = {alpha: fit(built(name), corpus, alphas=(alpha,)) for alpha in ALPHAS}
    wanted = {alpha: retained_by_loops(name, single, corpus) for alpha, single in singles.items()}
    for alpha, value in wanted.items():
        assert 0 < value < 1
        assert stats.info["retained_energy_by_alpha"][str(alpha)] == pytest.approx(value, abs=2e-5)
    best = max(wanted, key=lambda alpha: wanted[alpha])
    assert len({round(v, 4) for v in wanted.values()}) == len(wanted)
    assert stats.info["alpha"] == best
    assert stats.info["retained_energy"] == pytest.approx(wanted[best], abs=2e-5)
    assert stats.info["retained_energy_at"] == {"budget": BUDGET, "batch": BATCH}
    assert_same(stats, singles[best], 1e-6)


@over_models
def test_r2_is_measured_on_held_out_tokens_only(name: str) -> None:
    corpus, stats = reference.make_corpus(), usual_stats(name)
    fitted = reference.layers_of(built(name), corpus.fit.ids, corpus.fit.mask)
    held = reference.layers_of(built(name), corpus.held_out.ids, corpus.held_out.mask)
    total, weights = 0.0, 0.0
    for position, (layer, source) in enumerate(zip(held, fitted, strict=True)):
        a = stats.tensors["predictor_weight"][position].double()
        b = stats.tensors["predictor_bias"][position].double()
        for u in range(tiny.EXPERTS):
            y_fit = source.energy[(source.ids == u) & corpus.fit.mask[..., None]].log()
            mean = float(y_fit.mean()) if len(y_fit) else 0.0
            errors, spread = [], []
            for row, s in corpus.held_out.mask.nonzero().tolist():
                for v, _, e in layer.routes(row, s):
                    if v == u:
                        y, z = torch.tensor(e).double().log(), layer.hidden[row, s]
                        errors.append(float(y - a[u] @ (z / z.norm()) - b[u]) ** 2)
                        spread.append(float(y - mean) ** 2)
            r2 = float(stats.tensors["r2_heldout"][position, u])
            if len(errors) < 2 or not len(y_fit):
                assert r2 != r2
                continue
            assert r2 == pytest.approx(1 - sum(errors) / sum(spread), abs=1e-3)
            total, weights = total + len(y_fit) * r2, weights + len(y_fit)
    assert stats.info["r2_heldout"] == pytest.approx(total / weights, abs=1e-4)


def test_log_linear_energies_are_recovered_from_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """BASE's claim, planted: every expert's log energy is linear in z/|z|, and calibration recovers the slope."""
    model = tiny.build(tiny.available("qwen3_moe"), hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    experts = type(tiny.experts_modules(model)[0])
    g = torch.Generator().manual_seed(0)
    slope, bias = 1.5 * torch.randn(tiny.EXPERTS, 16, generator=g), torch.randn(tiny.EXPERTS, generator=g) - 2
    direction = torch.nn.functional.normalize(torch.randn(tiny.EXPERTS, 16, generator=g), dim=-1)

    @functools.wraps(experts.forward)
    def planted(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:  # noqa: ARG001
        unit = hidden / hidden.norm(dim=-1, keepdim=True)
        norm = ((unit @ slope.T + bias) / 2).exp().gather(-1, ids)
        return torch.einsum("tk,tk,tkd->td", weights, norm, direction[ids])

    monkeypatch.setattr(experts, "forward", planted)
    stats = fit(model, reference.make_corpus(rows=40, held_out=10, length=32), rows=8, batch=5)
    assert stats.info["alpha"] == ALPHAS[0]
    assert stats.info["r2_heldout"] > 0.99
    assert stats.info["retained_energy"] > 0.999
    for position in range(2):
        torch.testing.assert_close(stats.tensors["predictor_weight"][position], slope, rtol=0, atol=0.1)


def test_expert_without_tokens_is_counted_and_has_finite_statistics() -> None:
    model = tiny.build(tiny.available("deepseek_v3"))
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias[5] = -100.0
    stats = fit(model, reference.make_corpus())
    assert stats.info["experts_without_tokens"] == 2
    assert stats.tensors["count"][:, 5].eq(0).all()
    for key in ("predictor_weight", "predictor_bias", "energy_mean", "weight_mean", "output_norm_weighted"):
        assert stats.tensors[key].isfinite().all(), key
    assert stats.tensors["r2_heldout"][:, 5].isnan().all()
    assert stats.info["r2_heldout"] == stats.info["r2_heldout"]


def test_expert_without_fitted_tokens_has_no_r2() -> None:
    """Its mean cannot serve as the reference: over no tokens it is 0, and log energies are far from 0."""
    corpus = reference.make_corpus(held_out=20)
    corpus.fit.ids.fill_(7)  # one word: few experts see it
    stats = fit(built("qwen3_moe"), corpus)
    held = reference.layers_of(built("qwen3_moe"), corpus.held_out.ids, corpus.held_out.mask)
    checked = 0
    for position, layer in enumerate(held):
        for u in range(tiny.EXPERTS):
            if not stats.tensors["count"][position, u] and int((layer.ids == u).sum()) > 5:
                assert stats.tensors["r2_heldout"][position, u].isnan()
                checked += 1
    assert checked > 2


@over_models
def test_saved_statistics_give_the_same_routes(name: str, tmp_path: Path) -> None:
    stats = usual_stats(name)
    stats.save(tmp_path / "stats.safetensors")
    read = load_stats(tmp_path / "stats.safetensors")
    assert_same(stats, read)
    assert json.loads(json.dumps(dict(stats.info))) == dict(read.info)
    model, prompts, routed = built(name), tiny.prompts(4, 5, seed=9), []
    for source in (stats, read):
        with tiny.recorded(model) as calls, attach(model, f"base:budget={BUDGET}", source) as attached:
            tiny.generate(model, prompts, 6)
            assert attached.counters.fetched == BUDGET
        routed.append([call.ids for call in calls])
    assert all(torch.equal(a, b) for a, b in zip(*routed, strict=True))


def test_statistics_record_model_data_and_versions() -> None:
    corpus, stats = reference.make_corpus(), usual_stats("qwen3_moe")
    wanted = {
        "model": "tiny",
        "data": "text",
        "documents": 9,
        "tokens": corpus.fit.tokens,
        "held_out_tokens": corpus.held_out.tokens,
        "experts_without_tokens": int((stats.tensors["count"] == 0).sum()),
    }
    assert {key: stats.info[key] for key in wanted} == wanted
    assert "torch" in stats.info["versions"]
    shapes = {name: tuple(tensor.shape) for name, tensor in stats.tensors.items()}
    assert shapes.pop("predictor_weight") == (2, tiny.EXPERTS, 32)
    assert set(shapes.values()) == {(2, tiny.EXPERTS)}
    assert {tensor.dtype for tensor in stats.tensors.values()} == {torch.float32}


def test_default_budget_is_five_quarters_of_top_k() -> None:
    stats = fit(built("qwen3_moe"), reference.make_corpus(), budget=None)
    assert stats.info["retained_energy_at"]["budget"] == 4


@pytest.mark.parametrize("budget", [0, -1, tiny.EXPERTS + 1])
def test_impossible_budget_is_refused_before_the_first_pass(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_collect", None)
    with pytest.raises(ValueError, match=f"budget={budget} must be between 1 and the model's {tiny.EXPERTS} experts"):
        fit(built("qwen3_moe"), reference.make_corpus(), budget=budget)


class Interrupted(Exception):
    pass


def interrupt(monkeypatch: pytest.MonkeyPatch, attribute: str, at: int) -> list[int]:
    """Make call number `at` of a function of calibrate.run raise; returns the growing list of finished calls."""
    function, done = getattr(run, attribute), list[int]()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if len(done) == at:
            raise Interrupted
        result = function(*args, **kwargs)
        done.append(len(done))
        return result

    monkeypatch.setattr(run, attribute, wrapped)
    return done


def test_interrupted_calibration_resumes_where_it_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, corpus, resume = built("qwen3_moe"), reference.make_corpus(), tmp_path / "partial"
    whole = fit(model, corpus, group=1)
    with monkeypatch.context() as patch:
        interrupt(patch, "_collect", at=1)
        with pytest.raises(Interrupted):
            fit(model, corpus, group=1, resume=resume)
    assert resume.is_file()
    collected = interrupt(monkeypatch, "_collect", at=9)
    assert_same(whole, fit(model, corpus, group=1, resume=resume))
    assert len(collected) == 1  # the second layer's pass
    assert not resume.exists()


def test_interrupted_write_keeps_the_previous_resume_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, corpus, resume = built("qwen3_moe"), reference.make_corpus(), tmp_path / "partial"
    save_file, calls = run.save_file, list[Path]()

    def save(tensors: Any, path: Path, **settings: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            save_file(tensors, path, **settings)
        else:
            Path(path).write_bytes(b"half a file")
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(run, "save_file", save)
        with pytest.raises(Interrupted):
            fit(model, corpus, group=1, resume=resume)
    collected = interrupt(monkeypatch, "_collect", at=9)
    assert_same(fit(model, corpus, group=1), fit(model, corpus, group=1, resume=resume))
    assert len(collected) == 2 + 1


def test_partial_calibration_of_different_inputs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, resume = built("qwen3_moe"), tmp_path / "partial"
    with monkeypatch.context() as patch:
        interrupt(patch, "_collect", at=1)
        with pytest.raises(Interrupted):
            fit(model, reference.make_corpus(), group=1, resume=resume)
    monkeypatch.setattr(run, "_collect", None)
    inputs: list[tuple[Any, Corpus, dict[str, Any]]] = [
        (model, reference.make_corpus("other text"), {}),
        (model, reference.make_corpus(), {"alphas": (1.0,)}),
        (tiny.build(tiny.available("qwen3_moe"), seed=1), reference.make_corpus(), {}),
        (built("deepseek_v3"), reference.make_corpus(), {}),
    ]
    for different, corpus, settings in inputs:
        with pytest.raises(ValueError, match=r"partial is a partial calibration of another model, text or alpha grid"):
            fit(different, corpus, group=1, resume=resume, **settings)
    assert resume.is_file()


FACTS = ModelFacts("qwen3_moe", tuple(range(48)), 128, 8, 2048, "0" * 12)
ONE_LAYER = LayerSums.size_in_bytes(128, 2048)


@pytest.mark.parametrize(("memory", "layers"), [(ONE_LAYER, 1), (3 * ONE_LAYER - 1, 2), (1000 * ONE_LAYER, 48)])
def test_pass_takes_as_many_layers_as_fit_into_memory(memory: int, layers: int) -> None:
    assert layers_per_pass(FACTS, torch.device("cpu"), memory) == layers


def test_too_little_memory_is_refused_with_both_sizes() -> None:
    wanted = r"take 2\.0 GiB \(128 experts x 2048\^2 floats\), 1\.0 GiB may be used on cpu"
    with pytest.raises(MemoryError, match=wanted):
        layers_per_pass(FACTS, torch.device("cpu"), 2**30)


def test_free_memory_is_read_from_the_machine() -> None:
    assert 2**20 < run.free_memory(torch.device("cpu")) < 2**50
