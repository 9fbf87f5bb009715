"""Integration of lm-evaluation-harness: a model class with real decode batches, and eight tasks."""
