"""Windows of held-out text, of equal length, and the slice of each window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moebudget.calibrate.data import TokenizerLike, pack, tokenize, tokenize_slices

Sliced = tuple[Tensor, tuple[str, ...]]  # windows [n, S + 1], the slice of each


def read_windows(
    data: str, tokenizer: TokenizerLike, entries: int, length: int, limit: int, end_id: int | None
) -> Tensor:
    """At most `limit` windows [n, length + 1] of any text that calibration reads, mixed as by `load_windows`.

    Reads at most four times the tokens of `limit` windows.
    """
    documents, _ = tokenize(data, tokenizer, entries, max_tokens=4 * limit * (length + 1), min_document=2)
    packed = pack(documents, length + 1, end_id)
    return load_windows(packed.ids, packed.mask, limit)


def read_sliced(
    data: str, tokenizer: TokenizerLike, entries: int, length: int, limit: int, end_id: int | None, field: str
) -> Sliced:
    """As `read_windows`, for rows whose `field` names their slice (a language, a domain); the limit is per slice."""
    documents = tokenize_slices(data, tokenizer, entries, field, most=4 * limit * (length + 1))
    return sliced_windows(documents, length, end_id, limit)


def sliced_windows(
    documents: Mapping[str, Sequence[Sequence[int]]], length: int, end_id: int | None, limit: int | None
) -> Sliced:
    """Windows of the slices' documents, slice by slice; a mixed window belongs to the slice with most tokens."""
    names, end_tokens = list(documents), 0 if end_id is None else 1
    packed = pack([d for part in documents.values() for d in part], length + 1, end_id)
    labels = [[i] * (len(d) + end_tokens) for i, part in enumerate(documents.values()) for d in part]
    packed_labels = pack(labels, length + 1, None)
    windows = load_windows(packed.ids, packed.mask, limit)
    window_labels = load_windows(packed_labels.ids, packed_labels.mask, limit).mode(-1).values
    return windows, tuple(names[i] for i in window_labels.tolist())


def load_windows(ids: Tensor, mask: Tensor, limit: int | None = None) -> Tensor:
    """Full rows of packed text [n, S + 1], shuffled so that every batch mixes the domains of the text."""
    full = ids[mask.all(-1)]
    if not len(full):
        raise ValueError(
            f"the text does not fill one window of {ids.shape[1]} tokens; give more text or a shorter window"
        )
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(full), generator=generator)
    return full[order[:limit]]
