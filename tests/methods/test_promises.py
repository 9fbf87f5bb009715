"""The promises of every method, each one test over all methods, router kinds and shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moebudget.core.counters import count_step
from moebudget.core.layer_router import LayerRouter
from moebudget.core.ops import fetched_experts, native_union
from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.core.types import LayerStats, MissingStatisticError, Routing
from moebudget.methods.registry import parse
from tests.conftest import (
    BUDGETED,
    LISTED,
    OURS,
    POLICIES,
    PUBLISHED,
    Problem,
    assert_routes,
    assert_same,
    make_problem,
    over_kinds,
    over_policies,
    problems,
    solved,
    used_slots,
)
from tests.methods import reference, reference_published
from tests.methods.steps import cost_of, step_of

# Where the promises below do not hold, and why.
TWICE = (  # routes are replaced one by one, so an expert may come twice in a row
    "sere:s=1",
    "sere:s=2,rho=0.5,metric=cosine",
    "exfold:budget=M",
    "exfold_static:budget=M",
    "exfold_prefill:p=1",
    "base:budget=M,fill=substitute",
)
NEGATIVE = ("exfold:budget=M", "exfold_static:budget=M", "exfold_prefill:p=1")  # a folding scalar may be negative
CAEE = ("caee:theta=0.4", "caee_offload:theta=0.7")  # rank by the score alone, without bias and across closed groups
FEWER_THAN_OWN = ("topk:k=1", "topk:k=3", "oea:k0=1,k_max=1", "exfold_prefill:p=1", "skip")  # rules for each row
SPARE = (  # the set may hold experts that no row runs: it sums over all N, is static, or is voted by another order
    "lynx:alpha=1.5,beta=2",
    "exfold_static:budget=M",
    "xshare:k0=1,m=2",
    "xshare:k0=0,m=M,additive=no",
    "xshare:k0=1,m=0,m_request=2",
    "xshare_balanced:m=M",
    "xshare_ep:k0=1,m_device=1",
    "reap_static:budget=M",
    "moe_spec:budget=M",
    "acceptmoe:scale=0.5",
    *CAEE,
)
OF_THE_UNION = (  # published budgeted methods whose set is made of routed experts
    "exfold:budget=M",
    "reap:budget=M",
    "base:budget=M,fill=substitute",
    "base:budget=M,fill=preserved",
    "nonlinear:budget=M",
)
POPULARITY = ("lynx:alpha=1.5,beta=2",)  # experts of equal logits are ordered by the batch, at any alpha


def fields_of(text: str) -> tuple[str, dict[str, str]]:
    name, _, fields = text.partition(":")
    return name, dict(part.split("=") for part in fields.split(",") if part)


def reference_routes(text: str, problem: Problem) -> list[reference.Routes]:
    """The routes that the method executes, from the specification alone."""
    name, given = fields_of(text)
    rows, spec = problem.reference, problem.spec
    if text in OURS:
        active, fill = ours(name, given, problem)
        if fill == "by_layer":
            exponent = problem.plain_stats["layer_fill"][len(active) - 1] if active else 0.0
            fill = {0.0: "native", 0.5: "geometric", 1.0: "executed"}[exponent]
        if fill == "energy":
            energy = cost_of("base", problem)
            before = [reference.backfill(spec, row, active, "native") for row in rows]
            return [reference.energy_gain(t, r, x, energy) for t, (r, x) in enumerate(zip(rows, before, strict=True))]
        return [reference.backfill(spec, row, active, fill) for row in rows]
    if text in PUBLISHED:
        _, at_budget = fields_of(text.replace("M", str(problem.budget)))

        def base_set() -> set[int]:
            total = reference.demand(rows, spec.num_experts, cost_of(name, problem))
            return reference.top_budget(rows, total, problem.budget)

        def base_total() -> list[float]:
            return reference.demand(rows, spec.num_experts, cost_of("base", problem))

        return reference_published.routes_of(step_of(problem), name, at_budget, base_set, base_total)
    if name == "native":
        return [row.routes for row in rows]
    if name == "topk":
        return [reference.first_routes(spec, row, int(given["k"])) for row in rows]
    if name == "oea":
        active, fill = reference.first_union(rows, int(given["k0"])), given.get("fill", "executed")
    else:
        total = reference.demand(rows, spec.num_experts, cost_of(name, problem))
        active, fill = reference.top_budget(rows, total, problem.budget), given.get("fill", "native")
    if fill == "drop":
        return [reference.drop(row, active) for row in rows]
    return [reference.backfill(spec, row, active, fill) for row in rows]


def ours(name: str, given: Mapping[str, str], problem: Problem) -> tuple[set[int], str]:
    """The active set of our own methods, from their equations, and the fill."""
    chosen, fill, order = before_leveling(name, given, problem)
    if given.get("level") == "yes" and problem.reference:
        device = problem.plain_stats["placement_device"]
        members = [[u for u in order if device[u] == d] for d in range(max(device) + 1)]
        fullest = max(sum(u in chosen for u in some) for some in members)
        for some in members:
            fetched = sum(u in chosen for u in some)
            chosen |= set([u for u in some if u not in chosen][: fullest - fetched])
    return chosen, fill


def before_leveling(name: str, given: Mapping[str, str], problem: Problem) -> tuple[set[int], str, list[int]]:
    """The set, the fill, and the routed experts from the largest demand down."""
    rows, stats, m = problem.reference, problem.plain_stats, problem.budget
    if name == "worth":
        return worth(given, problem), given.get("fill", "geometric"), []
    cost = reference.relative(rows, cost_of("base", problem), float(given.get("relative", 0)))
    total = reference.demand(rows, problem.spec.num_experts, cost)
    order = reference.first_first(rows, total, given.get("floor") == "yes")
    entry = min(m, problem.spec.num_experts) - 1
    if name == "base":
        fill = given.get("fill", "native")
        fill = "native" if fill in ("mean_direction", "sketch") else fill  # their routes alone
        return set(order[:m]), fill, order
    if name == "base_ep":
        on = stats["placement_device"]
        return {u for u in order if [v for v in order if on[v] == on[u]].index(u) < m}, "native", order
    if name == "spread":
        return set(order[: stats["layer_budget"][entry]]), given.get("fill", "geometric"), order
    first = reference.first_union(rows, 1) if given.get("floor") == "yes" else set[int]()
    bought = {u for u in order if total[u] > stats["layer_price"][entry] or u in first}
    bought |= set(reference.first_first(rows, total, floor=False)[:1])
    kept = [u for u in order if u in bought]
    return set(kept[: int(given.get("ceiling", len(kept)))]), "geometric", order


def worth(given: Mapping[str, str], problem: Problem) -> set[int]:
    """Fetched: what carries its price, the largest, and what makes no device slower, the most costly to lose first."""
    if not problem.rows:
        return set()
    step = step_of(problem)
    total = reference.demand(step.rows, problem.spec.num_experts, cost_of(given.get("cost", "base"), problem))
    price, union = step.stats["placement_cost"], step.union()
    unit = float(given["least"]) * math.fsum(total) / len(union) / max(price)
    chosen = {u for u in union if total[u] >= unit * price[u]}
    chosen.add(min(union, key=lambda u: (-total[u], u)))
    most = reference_published.slowest(step, chosen)
    for u in sorted(union - chosen, key=lambda u: (-total[u], u)):
        if reference_published.slowest(step, chosen | {u}) <= most:
            chosen.add(u)
    return chosen


@over_policies(LISTED, every_kind=True)
def test_every_method_agrees_with_the_specification(text: str, kind: str) -> None:
    for problem, _, routing in solved(text, kind):
        assert_routes(routing, reference_routes(text, problem), problem.shape)


@over_policies()
def test_ids_are_in_range_and_unique_in_a_row(text: str, kind: str) -> None:
    for problem, _, routing in solved(text, kind):
        assert routing.ids.shape == routing.weights.shape == (problem.rows, problem.spec.top_k)
        assert routing.ids.dtype is torch.int64
        assert routing.weights.dtype is torch.float32
        assert ((routing.ids >= 0) & (routing.ids < problem.spec.num_experts)).all(), problem.shape
        for routes in used_slots(routing):
            assert len({u for u, _ in routes}) == len(routes) or text in TWICE, problem.shape


@over_policies()
def test_executed_ids_are_inside_the_active_set(text: str, kind: str) -> None:
    for problem, policy, routing in solved(text, kind):
        mask = policy.active(problem.batch, problem.stats).mask
        assert mask.shape == (problem.spec.num_experts,)
        assert mask[routing.ids].all(), problem.shape
        fetched = fetched_experts(routing, problem.batch)
        assert torch.equal(fetched, mask) or (text in SPARE and not (fetched & ~mask).any()), problem.shape


@over_policies((*BUDGETED, *OF_THE_UNION, *OURS[:2]))
def test_budgeted_methods_fetch_the_lesser_of_budget_and_native_union(text: str, kind: str) -> None:
    for problem, _, routing in solved(text, kind):
        fetched = int(fetched_experts(routing, problem.batch).sum())
        assert fetched == min(problem.budget, int(native_union(problem.batch).sum())), problem.shape


def unlimited(text: str, problem: Problem) -> list[Policy]:
    """The preset at limits that leave nothing out."""
    n, k = problem.spec.num_experts, problem.spec.top_k
    text = text.replace("k=1", f"k={k}").replace("k=3", f"k={k + 1}").replace("k0=2", "k0=9")
    name, fields = fields_of(text)
    loose: dict[str, dict[str, object]] = {
        "oea": {"k0": k, "p": 1.0} | {f: m for f, m in (("k_max", k), ("max_rank", n)) if f in fields},
        "sere": {"rho": 1.5} if "rho" in fields else {"s": k},
        "lynx": {"alpha": 1e9, "beta": 0},
        "lynx_lat": {"drop": 0},
        "exfold_prefill": {"p": k},
        "xshare": {"m_request": n} if "m_request" in fields else {"m": n},
        "xshare_balanced": {"m": n},
        "xshare_ep": {"m_device": n},
        "caee": {"theta": 1e-30},
        "caee_offload": {"theta": 1.0},
        "skip": {"scale": 1e-9},
        "des_vote": {"beta": 1.0},
        "dmoe": {"share": 1.0},
        "acceptmoe": {"scale": 1e9},
        "worth": {"least": 1e-30},
    }
    if name in loose:
        fields |= {field: str(value) for field, value in loose[name].items()}
    union = int(native_union(problem.batch).sum())
    # pools that hold experts nobody routes to; budgets and prices of the layer's own
    whole_model = name in ("exfold_static", "reap_static", "moe_spec", "spread", "price")
    if "ceiling" in fields:
        fields["ceiling"] = str(n)
    written = f"{name}:" + ",".join(f"{field}={value}" for field, value in fields.items())
    budgets = {n, n + 5} if whole_model else {max(union, 1), n, n + 5}
    return [parse(written.replace("=M", f"={budget}")) for budget in sorted(budgets)]


@over_policies()
def test_budget_of_all_experts_returns_native_routing_bit_for_bit(text: str, kind: str) -> None:
    for problem in problems(kind, text):
        for policy in unlimited(text, problem):
            routing = policy(problem.batch, problem.stats)
            assert torch.equal(routing.ids, problem.batch.ids), f"{policy} {problem.shape}"
            assert torch.equal(routing.weights, problem.batch.weights), f"{policy} {problem.shape}"


@over_policies(tuple(text for text in POLICIES if text not in POPULARITY))
def test_budget_of_all_experts_keeps_bfloat16_routes_with_ties(text: str, kind: str) -> None:
    """torch.topk, as models call it, breaks ties another way than a stable sort."""
    problem = make_problem(kind, 16, 64, 8)
    logits = (problem.logits / 8).round().bfloat16()
    choice, probs = problem.spec.scores(logits, problem.bias)
    ids = choice.topk(8).indices
    routes = (ids, probs.gather(-1, ids).bfloat16())
    assert not torch.equal(ids, problem.spec(problem.hidden, logits, bias=problem.bias).ids)
    tied = dataclasses.replace(problem, logits=logits, routes=routes)
    for policy in unlimited(text, tied):
        routing = policy(tied.batch, tied.stats)
        assert torch.equal(routing.ids, ids), policy
        assert torch.equal(routing.weights, routes[1].float()), policy


@over_policies()
def test_native_routes_inside_the_set_are_kept(text: str, kind: str) -> None:
    """Also under ties, and under ties between groups, that the model broke another way than we would."""
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        problem = make_problem(kind, 16, 64, 4, budget=12, seed=seed)
        group = problem.spec.num_experts // problem.spec.groups
        opened = torch.rand(16, problem.spec.groups, generator=g).topk(problem.spec.open_groups).indices
        outside = torch.ones(16, problem.spec.groups).scatter(-1, opened, 0).bool().repeat_interleave(group, -1)
        ids = torch.rand(16, 64, generator=g).masked_fill(outside, -1).topk(4).indices
        tied = dataclasses.replace(
            problem, logits=torch.zeros(16, 64), bias=None, routes=(ids, torch.full((16, 4), 0.25)), budget=12
        )
        policy = tied.policy(text)
        mask, routing = policy.active(tied.batch, tied.stats).mask, policy(tied.batch, tied.stats)
        executed = [{u for u, _ in routes} for routes in used_slots(routing)]
        for t in range(16):
            own = {u for u in ids[t].tolist() if mask[u]}
            assert own <= executed[t] or text in (*FEWER_THAN_OWN, *CAEE), f"seed {seed} row {t}"


GARBAGE = 4


def assert_same_counts(found: Tensor, wanted: Tensor) -> None:
    """Up to the order in which float32 shares of weight are added."""
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def padded(problem: Problem, given: bool) -> tuple[Problem, Tensor]:
    """The step with four padding rows of garbage mixed in, and where its own rows went."""
    t, n, k = problem.rows, problem.spec.num_experts, problem.spec.top_k
    g = torch.Generator().manual_seed(t)
    hidden = torch.cat([problem.hidden, torch.randn(GARBAGE, problem.hidden.shape[1], generator=g) * 1e20])
    logits = torch.cat([problem.logits, torch.randn(GARBAGE, n, generator=g) * 100])
    energies = torch.cat([problem.energies, torch.full((GARBAGE, n), 1e30)])
    hidden[t + 1], logits[t + 1], energies[t + 1], logits[t + 2, 0] = math.nan, math.nan, math.nan, math.inf
    ids = torch.cat([problem.batch.ids, torch.full((GARBAGE, k), -1)])
    weights = torch.cat([problem.batch.weights, torch.full((GARBAGE, k), 1e30)])
    ids[t + 3], weights[t + 3] = n + 10**12, math.nan
    order = torch.randperm(t + GARBAGE, generator=g)
    routes = (ids[order], weights[order]) if given else None
    mixed = problem.with_rows(hidden[order], logits[order], energies[order], kind=order < t, routes=routes)
    return mixed, order.argsort()[:t]


@over_policies()
@pytest.mark.parametrize("given", [False, True], ids=["own_routes", "model_routes"])
def test_padding_rows_change_nothing_for_others(text: str, kind: str, given: bool) -> None:
    for problem, policy, alone in solved(text, kind)[given::2]:
        mixed, mine = padded(problem, given)
        routing = policy(mixed.batch, mixed.stats)
        assert_same(Routing(routing.ids[mine], routing.weights[mine]), alone, problem.shape)
        mask = policy.active(mixed.batch, mixed.stats).mask
        assert torch.equal(mask, policy.active(problem.batch, problem.stats).mask), problem.shape
        pads = ~mixed.batch.decode
        assert pads.sum() == GARBAGE
        assert (routing.weights[pads] == 0).all()
        assert ((routing.ids >= 0) & (routing.ids < problem.spec.num_experts)).all()
        assert mask[routing.ids].all() or not problem.rows, problem.shape
        assert_same_counts(count_step(mixed.batch, routing), count_step(problem.batch, alone))


def spoil(problem: Problem, row: int) -> Problem:
    """The step with one row that is not finite, in one of three ways."""
    hidden, logits = problem.hidden.clone(), problem.logits.clone()
    way = problem.spec.num_experts % 3
    if way == 0:
        logits[row] = math.nan
    elif way == 1:
        hidden[row, 1] = -math.inf
    else:
        logits[row, 1] = math.inf
    ids, weights = problem.batch.ids.clone(), problem.batch.weights.clone()
    ids[row], weights[row] = -1, 7.0
    return problem.with_rows(hidden, logits, problem.energies, routes=(ids, weights))


@over_policies()
def test_nan_in_a_real_row_is_counted_and_stays_there(text: str, kind: str) -> None:
    for problem in problems(kind, text):
        if not problem.rows:
            continue
        row, policy = problem.rows // 2, problem.policy(text)
        spoilt, others = spoil(problem, row), torch.arange(problem.rows) != row
        rest = problem.take(others)
        routing, alone = policy(spoilt.batch, spoilt.stats), policy(rest.batch, rest.stats)
        assert_same(Routing(routing.ids[others], routing.weights[others]), alone, problem.shape)
        mask = policy.active(rest.batch, rest.stats).mask
        assert ((routing.ids[row] >= 0) & (routing.ids[row] < problem.spec.num_experts)).all()
        assert mask[routing.ids[row]].all() or problem.rows == 1, problem.shape
        assert routing.weights[row].isnan().all()
        router = LayerRouter(policy, problem.stats)
        router(spoilt.batch)
        assert router.totals[8] == 1
        expected = count_step(rest.batch, alone)
        expected[8] = 1
        assert_same_counts(router.totals, expected)


@over_policies()
def test_row_order_does_not_matter(text: str, kind: str) -> None:
    for problem, policy, routing in solved(text, kind):
        order = torch.randperm(problem.rows, generator=torch.Generator().manual_seed(3))
        shuffled = problem.take(order)
        found = policy(shuffled.batch, shuffled.stats)
        assert_same(found, Routing(routing.ids[order], routing.weights[order]), problem.shape)


@over_policies()
def test_two_calls_agree_and_inputs_stay_as_they_were(text: str, kind: str) -> None:
    """The second call runs where fresh memory is filled with NaN and huge ids, and unordered kernels are refused."""
    for problem, policy, routing in solved(text, kind):
        with poisoned_memory():
            again = policy(problem.batch, problem.stats)
        assert torch.equal(again.ids, routing.ids), problem.shape
        assert torch.equal(again.weights, routing.weights), problem.shape


class poisoned_memory:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


@over_policies()
def test_every_row_runs_an_expert(text: str, kind: str) -> None:
    for problem, _, routing in solved(text, kind):
        assert all(used_slots(routing)), problem.shape
        assert (routing.weights >= 0).all() or text in NEGATIVE
        assert routing.weights.isfinite().all()


@over_policies()
def test_unused_slots_name_an_expert_that_the_row_runs(text: str, kind: str) -> None:
    for problem, _, routing in solved(text, kind):
        for ids, routes in zip(routing.ids.tolist(), used_slots(routing), strict=True):
            assert set(ids) == {u for u, _ in routes}, problem.shape


def call(problem: Problem, policy: Policy) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """(hidden, logits, energies, decode) -> ids, weights, counters, with the router inside."""

    def run(hidden: Tensor, logits: Tensor, energies: Tensor, decode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step = problem.with_rows(hidden, logits, energies, kind=decode)
        routing = policy(step.batch, step.stats)
        return routing.ids, routing.weights, count_step(step.batch, routing)

    return run


def steps_of(kind: str, t: int, n: int, k: int) -> tuple[Problem, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Three independent steps of one layer, [3, T, ...], with padding in the second and nothing else in the third."""
    steps = [make_problem(kind, t, n, k, budget=5, seed=seed) for seed in (0, 777, 778)]
    decode = torch.ones(3, t, dtype=torch.bool)
    decode[1, t // 2 :], decode[2] = False, False
    hidden, logits, energies = (torch.stack([getattr(s, name) for s in steps]) for name in INPUTS)
    return steps[0], (hidden, logits, energies, decode)


INPUTS = ("hidden", "logits", "energies")
STEP_SHAPES = ((1, 8, 2), (2, 60, 8), (5, 64, 1), (16, 8, 8))


@over_policies()
@pytest.mark.parametrize("how", ["vmap", "leading"])
def test_many_steps_at_once_equal_one_at_a_time(text: str, kind: str, how: str) -> None:
    for shape in STEP_SHAPES:
        problem, inputs = steps_of(kind, *shape)
        run = call(problem, problem.policy(text))
        together = torch.vmap(run)(*inputs) if how == "vmap" else run(*inputs)
        for s in range(3):
            alone = run(*(x[s] for x in inputs))
            assert_same(Routing(together[0][s], together[1][s]), Routing(*alone[:2]), f"{shape} step {s}")
            assert_same_counts(together[2][s], alone[2])


@over_policies()
def test_nothing_is_read_on_the_host(text: str, kind: str) -> None:
    """Fake tensors have no values, so reading one, or a shape that depends on one, raises."""
    problem = make_problem(kind, 5, 60, 8)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(getattr(problem, name)) for name in INPUTS}
        bias = None if problem.bias is None else mode.from_tensor(problem.bias)
        stats = LayerStats({name: mode.from_tensor(tensor) for name, tensor in problem.stats.items()})
        decode = mode.from_tensor(torch.ones(5, dtype=torch.bool))
        step = dataclasses.replace(problem, **fake, bias=bias, stats=stats, kind=decode)
        policy = problem.policy(text)
        if policy.budget is not None:
            policy = policy.with_budget(mode.from_tensor(torch.tensor(problem.budget)))
        routing = LayerRouter(policy, stats)(step.batch)
    assert routing.ids.shape == routing.weights.shape == (5, 8)


@pytest.mark.parametrize("kind", ["softmax_renorm", "groups_top2"])
@pytest.mark.parametrize("text", POLICIES)
def test_recorded_graphs_hold_no_values(text: str, kind: str) -> None:
    """As a CUDA graph does: record on one step and budget, replay on another."""
    problem, inputs = steps_of(kind, 5, 60, 8)
    policy = problem.policy(text)

    def run(budget: Tensor, *step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return call(problem, policy if policy.budget is None else policy.with_budget(budget))(*step)

    graph = make_fx(run)(torch.tensor(5), *(x[0] for x in inputs))
    assert "_local_scalar_dense" not in graph.code
    for budget, step in ((5, 0), (2, 1), (60, 0)):
        arguments = (torch.tensor(budget), *(x[step] for x in inputs))
        found, wanted = graph(*arguments), run(*arguments)
        assert_same(Routing(*found[:2]), Routing(*wanted[:2]))
        assert_same_counts(found[2], wanted[2])


class Recording(Mapping[str, Tensor]):
    """Statistics that remember what was read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.seen = tensors, set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.seen.add(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("text", POLICIES)
def test_methods_read_exactly_the_statistics_they_need(text: str) -> None:
    problem = make_problem("softmax_renorm", 2, 8, 2)
    policy, recording = problem.policy(text), Recording(problem.stats)
    policy(problem.batch, recording)  # type: ignore[arg-type]
    assert recording.seen == policy.needs
    for name in policy.needs:
        short = LayerStats({key: tensor for key, tensor in problem.stats.items() if key != name})
        for use in (lambda short=short: policy(problem.batch, short), lambda short=short: LayerRouter(policy, short)):
            ways = {"placement": "Placement.contiguous", "layer": "moebudget allocate", "sketch": "moebudget sketch"}
            made_by = ways.get(name.partition("_")[0], "moebudget calibrate")
            with pytest.raises(MissingStatisticError, match=f"{name!r}.*{made_by}"):
                use()


@pytest.mark.parametrize("text", POLICIES)
def test_methods_declare_that_they_read_energies(text: str) -> None:
    problem = make_problem("softmax_renorm", 2, 8, 2)
    policy, without = problem.policy(text), dataclasses.replace(problem.batch, energy=None)
    assert policy.needs_energy == text.startswith("oracle")
    if policy.needs_energy:
        with pytest.raises(ValueError, match="oracle"):
            policy(without, problem.stats)
    else:
        assert_same(policy(without, problem.stats), policy(problem.batch, problem.stats))


def test_two_tokens_with_two_experts_and_a_budget_of_one_are_rescued() -> None:
    """Top-1 routes to experts 1 and 2; expert 2 weighs more, and both tokens run it."""
    spec = RouterSpec(4, 1, renormalize=False)
    logits = torch.tensor([[0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 3.0, 0.0]])
    batch = spec(torch.ones(2, 4), logits)
    for text in ("squared:budget=1", "squared:budget=1,fill=executed", "squared:budget=1,fill=drop"):
        router = LayerRouter(parse(text))
        routing = router(batch)
        assert routing.ids.tolist() == [[2], [2]]
        assert torch.equal(routing.weights, batch.probs[:, 2:3])
        assert router.totals[7] == 1


def test_padding_of_five_rows_to_eight_does_not_vote() -> None:
    """Random pads of a CUDA graph, as found in several engines: the set grew from 14 to 42 experts."""
    problem = make_problem("softmax_renorm", 5, 64, 8)
    pads = make_problem("softmax_renorm", 3, 64, 8, seed=9)
    both = [torch.cat([getattr(p, name) for p in (problem, pads)]) for name in INPUTS]
    mixed = problem.with_rows(*both, kind=torch.arange(8) < 5)
    voting = problem.with_rows(*both)
    policy = parse("oea:k0=2")
    wanted = policy.active(problem.batch, problem.stats).mask
    assert torch.equal(policy.active(mixed.batch, problem.stats).mask, wanted)
    assert policy.active(voting.batch, problem.stats).mask.sum() > wanted.sum()


def test_padding_rows_with_id_minus_one_are_harmless() -> None:
    problem = make_problem("softmax_renorm", 2, 8, 2)
    ids, weights = problem.batch.ids.clone(), problem.batch.weights.clone()
    ids[1], weights[1] = -1, 0
    step = dataclasses.replace(problem, kind=torch.tensor([True, False]), routes=(ids, weights))
    for text in POLICIES:
        policy = step.policy(text)
        routing = policy(step.batch, step.stats)
        assert policy.active(step.batch, step.stats).mask[routing.ids].all(), text
        assert routing.weights[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("text", BUDGETED)
def test_budget_below_the_routes_of_a_token_holds(text: str) -> None:
    problem = make_problem("softmax_renorm", 5, 64, 8, budget=2)
    policy = problem.policy(text)
    routing = policy(problem.batch, problem.stats)
    assert fetched_experts(routing, problem.batch).sum() == 2
    assert {len(routes) for routes in used_slots(routing)} <= {1, 2}


@pytest.mark.parametrize("text", BUDGETED)
def test_batch_of_one_is_native_at_a_budget_of_its_routes(text: str) -> None:
    problem = make_problem("sigmoid_bias", 1, 64, 8, budget=8)
    router = LayerRouter(problem.policy(text), problem.stats)
    routing = router(problem.batch)
    assert torch.equal(routing.ids, problem.batch.ids)
    assert torch.equal(routing.weights, problem.batch.weights)
    assert router.totals[9] == 1


@over_kinds
def test_ties_keep_the_lowest_experts(kind: str) -> None:
    problem = make_problem(kind, 4, 64, 8, budget=3)
    equal = dataclasses.replace(problem, logits=torch.ones(4, 64), bias=None)
    routing = parse("squared:budget=3")(equal.batch, equal.stats)
    assert [[u for u, _ in routes] for routes in used_slots(routing)] == [[0, 1, 2]] * 4


# BASE, figure 2: five tokens, eight experts, two routes per token. Our numbers: weights [T, 2] and energies [N].
FIGURE_ROUTES = ((1, 3), (1, 3), (4, 3), (5, 3), (8, 4))
FIGURE_WEIGHTS = ((0.6, 0.4), (0.55, 0.45), (0.6, 0.4), (0.6, 0.4), (0.7, 0.3))
FIGURE_ENERGIES = (2.0, 1.0, 3.0, 4.0, 0.1, 1.0, 1.0, 0.2)


def figure() -> Problem:
    probs = torch.full((5, 8), 1e-4)
    for t, (experts, weights) in enumerate(zip(FIGURE_ROUTES, FIGURE_WEIGHTS, strict=True)):
        probs[t, torch.tensor(experts) - 1] = torch.tensor(weights)
    energies = torch.tensor(FIGURE_ENERGIES)
    stats = LayerStats({"predictor_weight": torch.zeros(8, 2), "predictor_bias": energies.log()})
    return Problem(RouterSpec(8, 2), torch.ones(5, 2), probs.log(), energies.expand(5, 8), None, stats, 3)


def experts_of(policy: Policy, problem: Problem) -> set[int]:
    """Numbered from 1, as in the figure."""
    return {u + 1 for u in policy.active(problem.batch, problem.stats).mask.nonzero()[:, 0].tolist()}


def test_figure_2_keeps_costly_experts_that_are_nobodys_first() -> None:
    """D = e1 1.33, e3 2.05, e4 1.80, e5 0.04, e8 0.10: the three to keep are e1, e3 and e4."""
    problem = figure()
    scores = parse("base:budget=3").score(problem.batch, problem.stats).sum(0)
    assert scores.tolist() == pytest.approx([1.325, 0, 2.0475, 1.8, 0.036, 0, 0, 0.098], rel=1e-4)
    assert experts_of(parse("oea:k0=1"), problem) == {1, 4, 5, 8}
    assert experts_of(parse("base:budget=3"), problem) == {1, 3, 4}
    assert experts_of(parse("oracle:budget=3"), problem) == {1, 3, 4}
    assert experts_of(parse("base:budget=5"), problem) == {1, 3, 4, 5, 8}


def test_figure_2_backfills_by_rank_inside_the_set() -> None:
    """Tokens 4 and 5 lose their best expert and run the next of the set; the rest keeps both routes."""
    problem = figure()
    routes = used_slots(parse("base:budget=3")(problem.batch, problem.stats))
    assert [{u + 1 for u, _ in row} for row in routes[:3]] == [{1, 3}, {1, 3}, {3, 4}]
    assert [u + 1 for u, _ in routes[3]] == [3, 1]
    assert [u + 1 for u, _ in routes[4]] == [4, 1]
    assert routes[3][0][1] == pytest.approx(0.4, rel=1e-4)
    dropped = used_slots(parse("base:budget=3,fill=drop")(problem.batch, problem.stats))
    assert [[u + 1 for u, _ in row] for row in dropped] == [[1, 3], [1, 3], [4, 3], [3], [4]]


def test_changed_budgets_are_checked_and_named() -> None:
    policy = parse("base:budget=10,fill=drop")
    changed = policy.with_budget(4)
    assert changed.budget == 4
    assert changed == parse("base:budget=4,fill=drop")
    assert str(changed) == "base:budget=4,fill=drop"
    assert policy.budget == 10
    for wrong in (0, -1, True, 2.5, "ten"):
        with pytest.raises(ValueError, match="budget"):
            policy.with_budget(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'oea:k0=1' has no budget"):
        parse("oea:k0=1").with_budget(4)
