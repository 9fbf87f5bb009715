"""Calibration: from text to the statistics that policies read (`moebudget calibrate`)."""

from __future__ import annotations

from moebudget.calibrate.data import Corpus, DataError, Packed, load_corpus, merge_corpora
from moebudget.calibrate.run import DEFAULT_ALPHAS, calibrate

__all__ = ["DEFAULT_ALPHAS", "Corpus", "DataError", "Packed", "calibrate", "load_corpus", "merge_corpora"]
