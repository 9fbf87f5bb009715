"""Policies: one Score, one Select and one Fill, and the base classes of the three."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moebudget.core.types import NO_STATS, PLACEMENT, Active, LayerStats, RouterBatch, Routing


class Score(ABC):
    """How much it would cost each row to lose an expert: [T, N] float32, 0 where the expert is no candidate.

    Rows that do not vote score 0 everywhere, whatever they hold. A subclass is a frozen dataclass: its fields are the
    hyper-parameters, and its call is the rule.
    """

    __slots__ = ()

    @property
    def needs(self) -> frozenset[str]:
        """Statistics that the rule reads, exactly; none unless a subclass says so."""
        return frozenset()

    @property
    def needs_energy(self) -> bool:
        """Whether the rule reads `batch.energy`, which analysis runs alone compute."""
        return False

    @abstractmethod
    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor: ...


class Select(ABC):
    """Which experts the whole step may fetch, given scores [T, N].

    A selection with a field named `budget` has a budget: it can be read, checked and changed, by value or as a tensor
    on the device, through the policy that holds the selection.
    """

    __slots__ = ()

    @property
    def needs(self) -> frozenset[str]:
        """Statistics that the rule reads, exactly; none unless a subclass says so."""
        return frozenset()

    @abstractmethod
    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active: ...

    @property
    def caps(self) -> bool:
        """Whether a layer never fetches more than its budget, on average over the layers."""
        return False

    def get_budget(self) -> int | Tensor | None:
        """Experts per layer; None for a selection without a budget."""
        return getattr(self, "budget", None)

    def get_hold(self) -> float:
        """Share of an excess over the budget that each step corrects; 0 unless a field `hold` says otherwise."""
        return float(getattr(self, "hold", 0.0))

    def with_budget(self, budget: int | Tensor) -> Select:
        """The same selection with another budget, checked."""
        return dataclasses.replace(self, budget=self.checked_budget(budget))  # type: ignore[type-var]

    def checked_budget(self, budget: int | Tensor) -> int | Tensor:
        """The budget itself. Raises ValueError if the selection has none or it is no whole number of at least 1."""
        if self.get_budget() is None:
            raise ValueError(
                f"the selection {type(self).__name__} has no budget to change; policies with one: base, static, "
                "squared, ..."
            )
        if isinstance(budget, Tensor):
            return budget
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise ValueError(f"budget={budget!r} must be a whole number of at least 1")
        return budget


class Fill(ABC):
    """How every row is re-routed inside the active set, given the scores that chose it.

    Ids are inside the set; a slot of weight 0 is unused. Rows that lose no route keep their native ids and weights:
    `methods.fills.finish` sees to it.
    """

    __slots__ = ()

    @property
    def needs(self) -> frozenset[str]:
        """Statistics that the rule reads, exactly; none unless a subclass says so."""
        return frozenset()

    @abstractmethod
    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Score -> Select -> Fill: which experts a decode step fetches, and what each row runs.

    Calling it maps a RouterBatch (any leading dimensions before [T, ...], one per independent step) and the layer's
    statistics to a Routing. `name` is the policy string that `parse` reads; it does not take part in the result.
    """

    score: Score
    select: Select
    fill: Fill
    name: str = "custom"

    def __call__(self, batch: RouterBatch, stats: LayerStats = NO_STATS) -> Routing:
        scores = self.score(batch, stats)
        return self.fill(self.select(scores, batch, stats), scores, batch, stats)

    def active(self, batch: RouterBatch, stats: LayerStats = NO_STATS) -> Active:
        """The active set alone."""
        return self.select(self.score(batch, stats), batch, stats)

    @property
    def needs(self) -> frozenset[str]:
        """Statistics that the three parts read."""
        return self.score.needs | self.select.needs | self.fill.needs

    @property
    def needs_energy(self) -> bool:
        """Whether the true output energies of a step must be known before it is decided (the oracle)."""
        return self.score.needs_energy

    @property
    def needs_placement(self) -> bool:
        """Whether the policy reads which device holds an expert, or what fetching it costs."""
        return bool(self.needs & PLACEMENT)

    @property
    def budget(self) -> int | Tensor | None:
        """Experts per layer; per device for some selections. None: this policy has no budget."""
        return self.select.get_budget()

    def checked_budget(self, budget: int | Tensor) -> int | Tensor:
        """The budget itself; ValueError if the policy has none to change or it is no whole number of at least 1."""
        if self.budget is None:
            raise ValueError(
                f"policy {self.name!r} has no budget to change; policies with one: base, static, squared, ..."
            )
        return self.select.checked_budget(budget)

    def layer_budgets(self, budget: object, layers: int) -> tuple[int, ...]:
        """One budget per layer, from a number for all or a list. ValueError names both lengths or the wrong value."""
        many = isinstance(budget, Sequence) and not isinstance(budget, str)
        each: Sequence[Any] = budget if many else (budget,) * layers  # type: ignore[assignment]
        if len(each) != layers:
            raise ValueError(
                f"{len(each)} budgets were given and the model has {layers} Mixture-of-Experts layers: "
                "give one number for all, or one per layer"
            )
        for value in each:
            self.checked_budget(value)
        return tuple(each)

    def with_budget(self, budget: int | Tensor) -> Policy:
        """The same policy with another budget; a tensor makes the budget a device value.

        Raises ValueError below 1 or for a policy without a budget.
        """
        budget = self.checked_budget(budget)
        name = self.name if isinstance(budget, Tensor) else re.sub(r"\bbudget=\d+", f"budget={budget}", self.name)
        return dataclasses.replace(self, select=self.select.with_budget(budget), name=name)

    def __str__(self) -> str:
        return self.name
