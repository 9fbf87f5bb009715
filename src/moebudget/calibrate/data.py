"""Calibration text: documents from files or a hub, split into two parts and packed into rows."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

SEPARATOR = "<|endoftext|>"
DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu"
HELD_OUT_EVERY = 5


class DataError(ValueError):
    """Text that cannot be used; the message gives the reason."""


class TokenizerLike(Protocol):
    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """Concatenated documents in rows of equal length; `mask` is False on the padding of the last row."""

    ids: Tensor  # [n, S] int64
    mask: Tensor  # [n, S] bool

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class Corpus:
    """A fit part and a held-out part without common text, and an id for source, split and packing."""

    fit: Packed
    held_out: Packed
    id: str
    documents: int


def _texts_of_file(path: Path, field: str | None) -> Iterator[tuple[str, str]]:
    opener = lzma.open if path.suffix == ".xz" else Path.open
    name = path.name.removesuffix(".xz")
    try:
        with opener(path, mode="rt", encoding="utf-8") as file:
            if name.endswith(".jsonl"):
                for number, line in enumerate(file, start=1):
                    yield _json_text(path, number, str(line), field)
            elif field is not None:
                raise DataError(f"{path} has no slices: the field {field!r} is read from the rows of a .jsonl file")
            else:
                for text in re.split(rf"(?:\A|\n|(?<=\n)){re.escape(SEPARATOR)}(?:\n|\Z)", file.read()):
                    yield "", text
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path} is damaged or not an .xz file: {error}") from error


def _json_text(path: Path, number: int, line: str, field: str | None) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error})") from error
    for needed in ("text",) if field is None else ("text", field):
        if not isinstance(row, dict) or not isinstance(row.get(needed), str):
            have = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise DataError(f"{path}, line {number}: no string in a field {needed!r} (the line holds: {have})")
    return "" if field is None else row[field], row["text"]


def _texts_of_hub(name: str, field: str | None) -> Iterator[tuple[str, str]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"there is no file or folder {name!r}; install moebudget[data] to read it as a data set of the Hugging "
            "Face hub, or pass a text file, a folder or a .jsonl file"
        ) from error
    try:
        for row in load_dataset(name, split="train", streaming=True):
            yield "" if field is None else str(row[field]), str(row["text"])
    except (ConnectionError, FileNotFoundError, KeyError, OSError, ValueError) as error:
        fields = "field 'text'" if field is None else f"fields 'text' and {field!r}"
        raise DataError(f"the hub data set {name!r} could not be read as rows with {fields}: {error}") from error


def read_texts(source: str) -> Iterator[str]:
    """Documents of a text file (split at lines `<|endoftext|>`), a .jsonl file (field `text`), either of them as .xz,
    a folder of such files in name order, or a hub data set. Raises DataError that names the file and the line."""
    for _, text in read_slices(source, None):
        yield text


def read_slices(source: str, field: str | None) -> Iterator[tuple[str, str]]:
    """(slice, document) in the order of `read_texts`; the slice is a row's `field`, such as its language."""
    path = Path(source)
    if path.is_dir():
        visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in visible if p.is_file())
        if not files:
            raise DataError(f"the folder {path} holds no files")
        for file in files:
            yield from _texts_of_file(file, field)
    elif path.is_file():
        yield from _texts_of_file(path, field)
    elif path.suffix or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise DataError(f"no file or folder at {source!r}, and it is not the name of a hub data set (owner/name)")
    else:
        yield from _texts_of_hub(source, field)


def pack(documents: Sequence[Sequence[int]], length: int, end: int | None) -> Packed:
    """Concatenate documents (`end` after each) and cut them into rows of `length`; the last row is padded.

    A last row of fewer than two tokens is dropped.
    """
    flat = [token for document in documents for token in (*document, *([] if end is None else [end]))]
    rows = [flat[i : i + length] for i in range(0, len(flat), length)]
    if rows and len(rows[-1]) < 2:
        rows.pop()
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return Packed(ids, mask)


def split_documents(documents: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Every fifth document is held out; with fewer than five, the last fifth of each.

    BASE holds out the last fifth of the documents; every fifth keeps the domains of a sorted source in both parts.
    """
    if len(documents) >= HELD_OUT_EVERY:
        return (
            [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1],
            documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY],
        )
    cuts = [len(d) - len(d) // HELD_OUT_EVERY for d in documents]
    return [d[:c] for d, c in zip(documents, cuts, strict=True)], [d[c:] for d, c in zip(documents, cuts, strict=True)]


def load_corpus(
    source: str,
    tokenizer: TokenizerLike,
    vocabulary: int,
    *,
    length: int = 2048,
    max_tokens: int | None = None,
    min_document: int = 128,
) -> Corpus:
    """Read a text, tokenize it, split it by document and pack both parts into rows of `length`.

    `vocabulary` is the number of rows of the model's embedding; a tokenizer with more entries is an error. Reading
    stops after `max_tokens` (both parts together). Documents of fewer than `min_document` tokens are left out.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    documents, digest = tokenize(source, tokenizer, vocabulary, max_tokens=max_tokens, min_document=min_document)
    total = sum(map(len, documents))
    fit, held_out = split_documents(documents)
    corpus = Corpus(
        pack(fit, length, end),
        pack(held_out, length, end),
        f"{Path(source).name}:{digest}:{total}x{length}",
        len(documents),
    )
    if not len(corpus.held_out.ids):
        raise DataError(f"{source} has only {total} tokens, too few for a held-out part: give at least 20")
    return corpus


def tokenize(
    source: str,
    tokenizer: TokenizerLike,
    vocabulary: int,
    *,
    max_tokens: int | None = None,
    min_document: int = 128,
) -> tuple[list[list[int]], str]:
    """(token ids of the usable documents, 12 hex digits of a hash of their text). Arguments as in `load_corpus`."""
    _check_vocabulary(tokenizer, vocabulary)
    documents: list[list[int]] = []
    total, short, digest = 0, 0, hashlib.sha256()
    for text in read_texts(source):
        tokens = list(tokenizer(text.strip("\n"), add_special_tokens=False)["input_ids"])
        if len(tokens) < min_document:
            short += 1
            continue
        if max_tokens is not None:
            tokens = tokens[: max_tokens - total]
        documents.append(tokens)
        digest.update(text.encode() + b"\0")
        total += len(tokens)
        if max_tokens is not None and total >= max_tokens:
            break
    if not documents:
        raise DataError(
            f"{source} has no usable document: {short} are shorter than {min_document} tokens; "
            "give more text or lower --min-document"
        )
    return documents, digest.hexdigest()[:12]


def tokenize_slices(
    source: str, tokenizer: TokenizerLike, vocabulary: int, field: str, *, most: int, min_document: int = 2
) -> dict[str, list[list[int]]]:
    """Token ids of the documents of every slice (see `read_slices`), in the slices' order; at most `most` of each."""
    _check_vocabulary(tokenizer, vocabulary)
    documents: dict[str, list[list[int]]] = {}
    room: dict[str, int] = {}
    for name, text in read_slices(source, field):
        if room.setdefault(name, most) <= 0:
            continue
        tokens = list(tokenizer(text.strip("\n"), add_special_tokens=False)["input_ids"])[: room[name]]
        if len(tokens) >= min_document:
            documents.setdefault(name, []).append(tokens)
            room[name] -= len(tokens)
    return documents


def _check_vocabulary(tokenizer: TokenizerLike, vocabulary: int) -> None:
    if len(tokenizer) > vocabulary:
        raise DataError(
            f"the tokenizer has {len(tokenizer)} entries, the model embeds {vocabulary}: "
            "use the tokenizer of this model"
        )


def merge_corpora(corpora: Sequence[Corpus]) -> Corpus:
    """Merge corpora of equal row length, interleaving their rows so that every batch mixes them."""
    lengths = {c.fit.ids.shape[1] for c in corpora}
    if len(lengths) != 1:
        raise DataError(f"corpora with rows of different lengths cannot be merged: {sorted(lengths)}")
    fit, held_out = (_interleave([getattr(c, part) for c in corpora]) for part in ("fit", "held_out"))
    return Corpus(fit, held_out, "+".join(c.id for c in corpora), sum(c.documents for c in corpora))


def _interleave(parts: Sequence[Packed]) -> Packed:
    position = torch.cat([torch.linspace(0, 1, len(p.ids)) for p in parts])
    order = position.sort(stable=True).indices
    return Packed(torch.cat([p.ids for p in parts])[order], torch.cat([p.mask for p in parts])[order])
