"""The other papers' methods as presets; docs/methods/ says of each what is certain and what is our reading."""

from __future__ import annotations

from dataclasses import replace

from moebudget.device_selects import CostInvariant, PerDevice, RoundRobin, Threshold
from moebudget.fill import Backfill, Fold, OwnRoutes, Substitute
from moebudget.policy import Policy
from moebudget.rival_scores import (
    AcceptedMass,
    AffinityBins,
    GateMass,
    HeaviestRoutes,
    KeptRatio,
    NormMass,
    Profile,
    RouteScore,
    RouteShare,
)
from moebudget.rival_selects import AllBut, Critical, EffectiveRank, RetainedShare, ShareOfExperts, VotedBy, WarmUp
from moebudget.score import COSTS, RouteRank, RouterMass, Score
from moebudget.select import TopBudget, Voted
from moebudget.spelling import choice, count, fill_of, number, spell

METRICS = ("frobenius", "cosine", "cka")
YES_NO = ("yes", "no")
DEVICE_SCORES: dict[str, Score] = {"gate": GateMass(), **COSTS}
CAEE_FILL = Backfill("executed", everywhere=True)


def oea(
    k0: int, p: float = 1.0, k_max: int | None = None, max_rank: int | None = None, fill: str = "executed"
) -> Policy:
    """OEA: the union of every row's top-k0 (or fewer, up to share p), then each row's best inside it, renormalised.

    https://arxiv.org/abs/2511.02237, section 3. The simplified form has k0 alone: p = 1, k_max = K, max_rank = N. For
    models that do not renormalise the weights stay as the model makes them (our reading; the paper has renormalising
    models only).
    """
    k0, p = count("oea", "k0", k0), number("oea", "p", p, most=1.0)
    rule = fill_of("oea", fill)
    if k_max is not None or max_rank is not None:
        for field, value in (("k_max", k_max), ("max_rank", max_rank)):
            if value is not None and count("oea", field, value) < k0:
                raise ValueError(f"oea: {field}={value} must be at least k0={k0}, the routes that a row is sure of")
        if not isinstance(rule, Backfill):
            raise ValueError(f"oea: k_max and max_rank limit a backfill; fill={fill} has none: use fill=executed")
        rule = replace(rule, k_max=k_max, max_rank=max_rank)
    defaults = {"p": 1.0, "k_max": None, "max_rank": None, "fill": "executed"}
    name = spell("oea", defaults, k0=k0, p=p, k_max=k_max, max_rank=max_rank, fill=fill)
    return Policy(RouteRank(k0, p), Voted(), rule, name)


def sere(s: int, rho: float = 0.0, metric: str = "frobenius") -> Policy:
    """SERE: a row's routes beyond its first s go to the most similar of the batch's first-s experts, weights kept.

    https://arxiv.org/abs/2602.07616. An expert that resembles none of them by rho or more stays. An expert may come
    twice in a row.
    """
    s, rho = count("sere", "s", s), number("sere", "rho", rho, zero=True)
    statistic = f"similarity_{choice('sere', 'metric', metric, METRICS)}"
    name = spell("sere", {"rho": 0.0, "metric": "frobenius"}, s=s, rho=rho, metric=metric)
    return Policy(RouteRank(s), Critical(statistic, rho), Substitute(statistic), name)


def lynx(alpha: float, beta: int = 0) -> Policy:
    """Lynx: rows pick K experts by coarse preference bins, then by the batch's preference; each runs its best of them.

    https://arxiv.org/abs/2411.08982 v3. 1/alpha is a bin's width in nats, beta the bins below the top one (0: no end).
    """
    alpha, beta = number("lynx", "alpha", alpha), count("lynx", "beta", beta, least=0)
    name = spell("lynx", {"beta": 0}, alpha=alpha, beta=beta)
    return Policy(AffinityBins(alpha, beta), Voted(), Backfill("preserved"), name)


def lynx_lat(drop: int) -> Policy:
    """LYNX-Lat: without the `drop` experts that fewest rows route to; each row runs its best of the others.

    https://arxiv.org/abs/2411.08982v1.
    """
    drop, every_route = count("lynx_lat", "drop", drop, least=0), RouteRank(2**31)
    return Policy(every_route, AllBut(drop), Backfill("executed"), f"lynx_lat:drop={drop}")


def exfold(budget: int) -> Policy:
    """ExFold: the `budget` experts with the largest sum_t w_tu n_u; routes outside fold into the closest of the pool.

    https://arxiv.org/abs/2608.24938, the dynamic pool (their D). An expert may come twice in a row.
    """
    budget = count("exfold", "budget", budget)
    return Policy(NormMass(), TopBudget(budget), Fold(), f"exfold:budget={budget}")


def exfold_static(budget: int) -> Policy:
    """ExFold's static profile: the `budget` experts with the largest mean output norm, the same at every step."""
    budget = count("exfold_static", "budget", budget)
    return Policy(Profile("output_norm"), TopBudget(budget), Fold(), f"exfold_static:budget={budget}")


def exfold_prefill(p: int) -> Policy:
    """ExFold's prefill rule: a row's p heaviest routes stay, the others fold into the closest of them."""
    keep = HeaviestRoutes(count("exfold_prefill", "p", p))
    return Policy(keep, Voted(), Fold(keep), f"exfold_prefill:p={p}")


def xshare(k0: int, m: int, m_request: int = 0, additive: str = "yes") -> Policy:
    """XShare: the rows' top-k0, m_request experts a request, then m of the batch, by router scores over all experts.

    https://arxiv.org/abs/2602.07265, algorithms 1 (k0 = 0), 2, 3 and 4.
    """
    k0, m, m_request = (count("xshare", f, v, 0) for f, v in (("k0", k0), ("m", m), ("m_request", m_request)))
    if not k0 + m + m_request:
        raise ValueError("xshare: k0, m and m_request are all 0, so no token could run any expert; give k0=1")
    on_top = choice("xshare", "additive", additive, YES_NO) == "yes"
    name = spell("xshare", {"m_request": 0, "additive": "yes"}, k0=k0, m=m, m_request=m_request, additive=additive)
    return Policy(GateMass(), WarmUp(k0, m, m_request, on_top), Backfill("executed"), name)


def xshare_balanced(m: int) -> Policy:
    """XShare's device-aware greedy rule: the devices take turns to add their best expert until there are m.

    https://arxiv.org/abs/2602.07265, algorithm 5. Reads a placement.
    """
    m = count("xshare_balanced", "m", m)
    return Policy(GateMass(), RoundRobin(m), Backfill("executed"), f"xshare_balanced:m={m}")


def xshare_ep(k0: int, m_device: int, additive: str = "yes", score: str = "gate") -> Policy:
    """XShare for expert parallelism: the rows' top-k0, then the m_device best others of every device.

    https://arxiv.org/abs/2602.07265, algorithm 6. Reads a placement. The paper's `score` is "gate", router scores over
    all experts; "base", "squared" and "router_mass" are those of the presets of these names.
    """
    k0, m_device = (count("xshare_ep", f, v, 0) for f, v in (("k0", k0), ("m_device", m_device)))
    if not k0 + m_device:
        raise ValueError("xshare_ep: k0 and m_device are both 0, so no token could run any expert")
    on_top = choice("xshare_ep", "additive", additive, YES_NO) == "yes"
    rule = DEVICE_SCORES[choice("xshare_ep", "score", score, DEVICE_SCORES)]
    defaults = {"additive": "yes", "score": "gate"}
    name = spell("xshare_ep", defaults, k0=k0, m_device=m_device, additive=additive, score=score)
    return Policy(rule, PerDevice(k0, m_device, on_top), Backfill("executed"), name)


def caee(theta: float, guard: str = "yes") -> Policy:
    """CAEE on the device: experts with a summed score of theta, and others that make no device slower.

    https://arxiv.org/abs/2606.29982. `guard` adds every row's first route (ours: without it a small batch may keep
    nothing). Reads a placement.
    """
    theta, on = number("caee", "theta", theta), choice("caee", "guard", guard, YES_NO) == "yes"
    name = spell("caee", {"guard": "yes"}, theta=theta, guard=guard)
    return Policy(RouteScore(), CostInvariant(Threshold(theta, on)), CAEE_FILL, name)


def caee_offload(theta: float) -> Policy:
    """CAEE with offloaded experts: each row's first routes up to a share theta, and others that cost no more time.

    https://arxiv.org/abs/2606.29982. Resident experts cost nothing. Reads a placement.
    """
    theta = number("caee_offload", "theta", theta, most=1.0)
    must = VotedBy(RouteShare(theta))
    return Policy(RouteScore(), CostInvariant(must), CAEE_FILL, spell("caee_offload", {}, theta=theta))


def skip(scale: float = 1.0) -> Policy:
    """Dynamic skipping: a route much lighter than the row's heaviest is left out, the rest renormalised.

    Lu et al., https://arxiv.org/abs/2402.14800: threshold = median ratio on calibration tokens, here times `scale`.
    """
    rule = KeptRatio(number("skip", "scale", scale))
    return Policy(rule, Voted(), OwnRoutes(rule), spell("skip", {"scale": 1.0}, scale=rule.scale))


def reap(budget: int) -> Policy:
    """REAP's criterion on the batch: the `budget` experts with the largest sum_t w_tu n_u; each row runs its best.

    https://arxiv.org/abs/2510.13999, with the batch in the calibration set's place (ours). Scores as ExFold does.
    """
    budget = count("reap", "budget", budget)
    return Policy(NormMass(), TopBudget(budget), Backfill("executed"), f"reap:budget={budget}")


def reap_static(budget: int, protect: str = "yes") -> Policy:
    """REAP: the layer pruned to the `budget` experts with the largest mean w |E(z)|, the same at every step.

    https://arxiv.org/abs/2510.13999. `protect` keeps super experts first.
    """
    budget = count("reap_static", "budget", budget)
    on = choice("reap_static", "protect", protect, YES_NO) == "yes"
    name = spell("reap_static", {"protect": "yes"}, budget=budget, protect=protect)
    return Policy(Profile("output_norm_weighted", on), TopBudget(budget), Backfill("executed"), name)


def moe_spec(budget: int, fill: str = "executed") -> Policy:
    """MoE-Spec: the `budget` experts with the largest sum of router scores over all rows; `fill=drop` truncates.

    https://arxiv.org/abs/2602.16052; made for the draft tokens of one request.
    """
    budget = count("moe_spec", "budget", budget)
    name = spell("moe_spec", {"fill": "executed"}, budget=budget, fill=fill)
    return Policy(GateMass(), TopBudget(budget), fill_of("moe_spec", fill), name)


def des_vote(beta: float = 0.15) -> Policy:
    """DES-Vote: the max(K, beta N) experts with the largest sum of weights over the routes, renormalised.

    https://arxiv.org/abs/2602.00879; made for blocks of a diffusion model. DES-Seq is `oea`.
    """
    beta = number("des_vote", "beta", beta, most=1.0)
    name = spell("des_vote", {"beta": 0.15}, beta=beta)
    return Policy(RouterMass(), ShareOfExperts(beta), Backfill("executed"), name)


def dmoe(share: float = 0.6) -> Policy:
    """dMoE: the fewest experts with `share` of the batch's summed weights; the set's size follows the batch.

    https://arxiv.org/abs/2605.30876 (the paper also trains the model for it).
    """
    share = number("dmoe", "share", share, most=1.0)
    return Policy(RouterMass(), RetainedShare(share), Backfill("executed"), spell("dmoe", {"share": 0.6}, share=share))


def acceptmoe(scale: float = 1.0) -> Policy:
    """AcceptMoE: as many experts as the entropy of the batch's demand says are wanted, times `scale` (ours).

    https://arxiv.org/abs/2608.02989; demand is weighted by the acceptance probability of draft tokens.
    """
    scale = number("acceptmoe", "scale", scale)
    name = spell("acceptmoe", {"scale": 1.0}, scale=scale)
    return Policy(AcceptedMass(), EffectiveRank(scale), Backfill("executed"), name)


EXAMPLES: dict[str, str] = {
    "oea": "oea:k0=2",
    "sere": "sere:s=2",
    "lynx": "lynx:alpha=1,beta=1",
    "lynx_lat": "lynx_lat:drop=8",
    "exfold": "exfold:budget=8",
    "exfold_static": "exfold_static:budget=8",
    "exfold_prefill": "exfold_prefill:p=4",
    "xshare": "xshare:k0=1,m=8",
    "xshare_balanced": "xshare_balanced:m=8",
    "xshare_ep": "xshare_ep:k0=1,m_device=2",
    "caee": "caee:theta=0.6",
    "caee_offload": "caee_offload:theta=0.8",
    "skip": "skip:scale=1",
    "reap": "reap:budget=8",
    "reap_static": "reap_static:budget=8",
    "moe_spec": "moe_spec:budget=8",
    "des_vote": "des_vote:beta=0.15",
    "dmoe": "dmoe:share=0.6",
    "acceptmoe": "acceptmoe:scale=0.5",
}
