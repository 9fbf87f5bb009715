"""Studies of what removal costs assume, on any model: geometry of expert outputs, ablations, batch size, draining."""

from __future__ import annotations

from moebudget.analyse.geometry import Geometry, geometry
from moebudget.analyse.studies import STUDIES, Setting, can_run, require_study, run_study

__all__ = ["STUDIES", "Geometry", "Setting", "can_run", "geometry", "require_study", "run_study"]
