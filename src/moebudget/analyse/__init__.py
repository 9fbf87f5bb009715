"""The analyses behind removal costs, on any model: geometry of expert outputs, ablations, batch size, draining."""

from __future__ import annotations

from moebudget.analyse.geometry import Geometry, geometry
from moebudget.analyse.studies import NEEDS, STUDIES, Setting, run_study

__all__ = ["NEEDS", "STUDIES", "Geometry", "Setting", "geometry", "run_study"]
