"""REAP: weight times mean output norm, on the batch or as fixed pruning."""

from __future__ import annotations

from moebudget.core.policy import Policy
from moebudget.methods.common import NormMass, Profile, TopBudget
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import Count, Tunable, register


@register(
    source="https://arxiv.org/abs/2510.13999",
    example="reap:budget=8",
    label="REAP on the batch",
    tune=Tunable("budget", 1, "N", counts=True),
)
def reap(budget: Count) -> Policy:
    """REAP's criterion on the batch: the `budget` experts with the largest sum_t w_tu n_u; each row runs its best.

    The batch takes the calibration set's place (ours). Scores as ExFold does.
    """
    return Policy(NormMass(), TopBudget(budget), Backfill("executed"))


@register(
    source="https://arxiv.org/abs/2510.13999",
    example="reap_static:budget=8",
    label="REAP, static pruning",
    tune=Tunable("budget", 1, "N"),
)
def reap_static(budget: Count, protect: bool = True) -> Policy:
    """REAP: the layer pruned to the `budget` experts with the largest mean w |E(z)|, the same at every step.

    `protect` keeps super experts first.
    """
    return Policy(Profile("output_norm_weighted", protect), TopBudget(budget), Backfill("executed"))
