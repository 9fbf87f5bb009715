"""Diagnosis of whether a budget speeds up a model: an estimate by bytes, measured step times, and a verdict."""
