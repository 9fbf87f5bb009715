"""Policy = one Score, one Select, one Fill; and its spelling, `name:field=value,...`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moebudget.device_selects import DeviceBudget, Level
from moebudget.fill import Fill
from moebudget.score import Score
from moebudget.select import Budgeted, Select
from moebudget.types import NO_STATS, PLACEMENT, Active, LayerStats, RouterBatch, Routing


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Score -> Select -> Fill: which experts a decode step fetches, and what each row runs.

    Calling it maps a RouterBatch (any leading dimensions before [T, ...], one per independent step) and the layer's
    statistics to a Routing. `name` is the spelling that `parse` reads; it does not take part in the result.
    """

    score: Score
    select: Select
    fill: Fill
    name: str = "custom"

    def __call__(self, batch: RouterBatch, stats: LayerStats = NO_STATS) -> Routing:
        return self.fill(self.active(batch, stats), batch, stats)

    def active(self, batch: RouterBatch, stats: LayerStats = NO_STATS) -> Active:
        """The set of experts alone, [N] bool."""
        return self.select(self.score(batch, stats), batch, stats)

    @property
    def needs(self) -> frozenset[str]:
        """The calibrated tensors that the three pieces read."""
        return self.score.needs | self.select.needs | self.fill.needs

    @property
    def needs_energy(self) -> bool:
        """Whether the true output energies of a step must be known before it is decided (the oracle)."""
        return self.score.needs_energy

    @property
    def needs_placement(self) -> bool:
        """Whether it looks at where experts lie or what they cost."""
        return bool(self.needs & PLACEMENT)

    @property
    def budget(self) -> int | Tensor | None:
        """Experts a layer; on a device for `DeviceBudget`. None: this policy has none."""
        select = self.budgeted
        return select.budget if isinstance(select, Budgeted | DeviceBudget) else None

    @property
    def budgeted(self) -> Select:
        """The selection that a budget belongs to, without the leveling around it."""
        return self.select.must if isinstance(self.select, Level) else self.select

    def checked_budget(self, budget: int | Tensor) -> int | Tensor:
        """The budget itself; ValueError if the policy has none to change or it is no whole number of at least 1."""
        if self.budget is None:
            raise ValueError(
                f"policy {self.name!r} has no budget to change; policies with one: base, static, squared, ..."
            )
        if isinstance(budget, Tensor):
            return budget
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise ValueError(f"budget={budget!r} must be a whole number of at least 1")
        return budget

    def layer_budgets(self, budget: object, layers: int) -> tuple[int, ...]:
        """One budget a layer, from a number for all or a list. ValueError names both lengths or the wrong value."""
        many = isinstance(budget, Sequence) and not isinstance(budget, str)
        given: Sequence[Any] = budget if many else (budget,) * layers  # type: ignore[assignment]
        if len(given) != layers:
            raise ValueError(
                f"{len(given)} budgets were given and the model has {layers} Mixture-of-Experts layers: "
                "give one number for all, or one a layer"
            )
        for value in given:
            self.checked_budget(value)
        return tuple(given)

    def with_budget(self, budget: int | Tensor) -> Policy:
        """The same policy with another budget; a tensor makes the budget a device value.

        Raises ValueError below 1 or for a policy without a budget.
        """
        budget = self.checked_budget(budget)
        select = self.budgeted
        assert isinstance(select, Budgeted | DeviceBudget)
        select = dataclasses.replace(select, budget=budget)
        name = self.name if isinstance(budget, Tensor) else re.sub(r"\bbudget=\d+", f"budget={budget}", self.name)
        whole = Level(select) if isinstance(self.select, Level) else select
        return dataclasses.replace(self, select=whole, name=name)

    def __str__(self) -> str:
        return self.name
