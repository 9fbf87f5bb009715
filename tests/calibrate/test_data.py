from __future__ import annotations

import json
import lzma
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moebudget.calibrate import Corpus, DataError, load_corpus, merge_corpora
from moebudget.calibrate.data import SEPARATOR, pack, read_texts, split_documents, tokenize

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = 0


class Letters:
    """One token per character: a = 1 ... z = 26, anything else 27; 0 ends a document."""

    eos_token_id = END

    def __init__(self, entries: int = 28) -> None:
        self.entries = entries

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [LETTERS.index(c) + 1 if c in LETTERS else 27 for c in text]}

    def __len__(self) -> int:
        return self.entries


DOCUMENTS = [letter * (5 + i) for i, letter in enumerate(LETTERS[:12])]


def as_text(documents: list[str]) -> str:
    return f"\n{SEPARATOR}\n".join(documents) + "\n"


def as_jsonl(documents: list[str]) -> str:
    return "".join(json.dumps({"id": i, "text": d}) + "\n" for i, d in enumerate(documents))


def load(path: Path, **settings: Any) -> Corpus:
    return load_corpus(str(path), Letters(), 28, **{"length": 8, "min_document": 1, **settings})


def tokens(*texts: str) -> set[int]:
    return {LETTERS.index(c) + 1 for text in texts for c in text}


def text_file(path: Path, documents: list[str] = DOCUMENTS) -> Path:
    path.write_text(as_text(documents))
    return path


@pytest.fixture(params=["text.txt", "text.jsonl", "text.txt.xz", "text.jsonl.xz"])
def any_format(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / str(request.param)
    content = as_jsonl(DOCUMENTS) if ".jsonl" in path.name else as_text(DOCUMENTS)
    path.write_bytes(lzma.compress(content.encode()) if path.suffix == ".xz" else content.encode())
    return path


def test_every_format_gives_the_same_documents(any_format: Path) -> None:
    assert [text.strip("\n") for text in read_texts(str(any_format))] == DOCUMENTS


def test_folder_is_read_in_name_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "b" / "second.jsonl").write_text(as_jsonl(["third"]))
    text_file(tmp_path / "a.txt", ["first", "second"])
    for hidden in (tmp_path / ".gitattributes", tmp_path / ".cache" / "download.lock"):
        hidden.write_text("not text")
    assert [text.strip("\n") for text in read_texts(str(tmp_path))] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (f"a\n{SEPARATOR}\nb\n{SEPARATOR}", ["a", "b", ""]),
        (f"a\n{SEPARATOR}\nb\n{SEPARATOR}\n", ["a", "b", ""]),
        (f"{SEPARATOR}\na\n{SEPARATOR}\n{SEPARATOR}\nb", ["", "a", "", "b"]),
        (f"a\r\n{SEPARATOR}\r\nb", ["a", "b"]),
        (f"a {SEPARATOR} in a line\n\nb", [f"a {SEPARATOR} in a line\n\nb"]),
    ],
)
def test_separator_is_a_whole_line_anywhere_in_the_file(tmp_path: Path, content: str, documents: list[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content.encode())
    assert list(read_texts(str(path))) == documents


@pytest.mark.parametrize(
    "name", ["gone.txt", "./gone", "/nowhere/gone", "~/gone", "gone", "a/b/c", "owner/name.jsonl"]
)
def test_missing_path_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="no file or folder at") as caught:
        list(read_texts(name))
    assert repr(name) in str(caught.value)


def test_error_for_an_empty_folder_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder .* holds no files"):
        list(read_texts(str(tmp_path)))


def test_error_for_a_hub_name_without_datasets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"no file or folder 'owner/name'; install moebudget\[data\]"):
        list(read_texts("owner/name"))


def test_hub_data_set_is_streamed_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def load_dataset(name: str, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        assert (name, split, streaming) == ("owner/name", "train", True)
        for i in range(1000):
            read.append(i)
            yield {"text": "a" * 10}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    corpus = load_corpus("owner/name", Letters(), 28, length=8, max_tokens=60, min_document=1)
    assert corpus.documents == len(read) == 6


@pytest.mark.parametrize("error", [ConnectionError("offline"), KeyError("text"), ValueError("no such config")])
def test_failing_hub_data_set_is_a_data_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=f"the hub data set 'owner/name' could not be read.*{error.args[0]}"):
        list(read_texts("owner/name"))


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_error_for_text_that_is_not_utf8_names_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes("naïve\n".encode("latin-1"))
    with pytest.raises(DataError, match=rf"{name} is not UTF-8 text"):
        list(read_texts(str(path)))


@pytest.mark.parametrize("content", [b"no xz at all", lzma.compress(b"some text " * 1000)[:-30]])
def test_error_for_a_damaged_xz_file_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.txt.xz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"text\.txt\.xz is damaged or not an \.xz file"):
        list(read_texts(str(path)))


def test_error_for_a_line_that_is_not_json_names_its_number(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"\n')
    with pytest.raises(DataError, match=r"text\.jsonl, line 2: not JSON"):
        list(read_texts(str(path)))


@pytest.mark.parametrize(
    ("line", "fields"), [('{"content": "x", "url": "y"}', "content, url"), ('{"text": 3}', "text"), ("[1, 2]", "list")]
)
def test_error_for_a_line_without_text_lists_its_fields(tmp_path: Path, line: str, fields: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"line 2: no string in a field 'text' \(the line holds: {fields}\)"):
        list(read_texts(str(path)))


def test_error_for_short_documents_names_the_limit_and_the_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable document: 12 are shorter than 17 tokens; .* --min-document"):
        load(text_file(tmp_path / "text.txt"), min_document=17)


def test_documents_shorter_than_the_limit_are_left_out(tmp_path: Path) -> None:
    documents, _ = tokenize(str(text_file(tmp_path / "text.txt")), Letters(), 28, min_document=15)
    assert list(map(len, documents)) == [15, 16]


def test_too_little_text_for_a_held_out_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only 4 tokens, too few for a held-out part"):
        load(text_file(tmp_path / "text.txt", ["abcd"]))


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    path = str(text_file(tmp_path / "text.txt"))
    with pytest.raises(DataError, match="the tokenizer has 30 entries, the model embeds 28"):
        load_corpus(path, Letters(30), 28)
    load_corpus(path, Letters(20), 28, length=8, min_document=1)  # models pad their embedding


def test_every_fifth_document_is_held_out_whole(tmp_path: Path) -> None:
    corpus = load(text_file(tmp_path / "text.txt"), length=10)
    held = {DOCUMENTS[4], DOCUMENTS[9]}
    letters = [set(part.ids[part.mask].tolist()) - {END} for part in (corpus.fit, corpus.held_out)]
    assert letters == [tokens(*(d for d in DOCUMENTS if d not in held)), tokens(*held)]
    assert corpus.documents == len(DOCUMENTS)
    assert corpus.fit.tokens + corpus.held_out.tokens == sum(map(len, DOCUMENTS)) + len(DOCUMENTS)


@pytest.mark.parametrize("count", [1, 4])
def test_with_fewer_than_five_documents_the_last_fifth_of_each_is_held_out(count: int) -> None:
    documents = [list(range(100 * i, 100 * i + 10 + i)) for i in range(1, count + 1)]
    fit, held_out = split_documents(documents)
    assert [a + b for a, b in zip(fit, held_out, strict=True)] == documents
    assert all(len(b) == 2 for b in held_out)


def test_five_documents_are_split_whole() -> None:
    fit, held_out = split_documents([[i] for i in range(5)])
    assert (fit, held_out) == ([[0], [1], [2], [3]], [[4]])


def test_packing_ends_every_document_and_masks_the_rest_of_the_last_row() -> None:
    packed = pack([[1, 2, 3], [4], [5, 6, 7]], 4, END)
    assert packed.ids.tolist()[:2] == [[1, 2, 3, END], [4, END, 5, 6]]
    assert packed.ids[2, :2].tolist() == [7, END]
    assert packed.mask.tolist() == [[True] * 4, [True] * 4, [True, True, False, False]]
    assert packed.tokens == 10


def test_packing_without_an_end_token_joins_documents() -> None:
    packed = pack([[1, 2], [3, 4]], 4, None)
    assert packed.ids.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(("count", "rows"), [(7, 1), (8, 2), (0, 0)])
def test_last_row_of_one_token_is_dropped(count: int, rows: int) -> None:
    packed = pack([list(range(1, count + 1))] if count else [], 6, None)
    assert packed.ids.shape == packed.mask.shape == (rows, 6)


@pytest.mark.parametrize("limit", [20, 23, 40])
def test_max_tokens_is_the_number_of_tokens_read(tmp_path: Path, limit: int) -> None:
    documents, _ = tokenize(str(text_file(tmp_path / "text.txt")), Letters(), 28, max_tokens=limit, min_document=1)
    flat = [token for document in documents for token in document]
    assert flat == [token for d in DOCUMENTS for token in Letters()(d, add_special_tokens=False)["input_ids"]][:limit]


def test_limit_above_the_text_changes_nothing(tmp_path: Path) -> None:
    path = text_file(tmp_path / "text.txt")
    unlimited, limited = load(path), load(path, max_tokens=10_000)
    assert torch.equal(unlimited.fit.ids, limited.fit.ids)
    assert unlimited.id == limited.id


def test_corpus_id_depends_on_text_length_and_limits(tmp_path: Path) -> None:
    path = text_file(tmp_path / "text.txt")
    changed = text_file(tmp_path / "changed.txt", [*DOCUMENTS[:-1], "z" * len(DOCUMENTS[-1])])
    names = [load(path).id, load(path, length=9).id, load(path, max_tokens=60).id, load(path, min_document=8).id]
    (tmp_path / "text.txt").write_bytes(changed.read_bytes())
    names.append(load(path).id)
    assert len(set(names)) == len(names)
    assert all(name.startswith("text.txt:") for name in names)
    assert load(path).id == names[-1]


def test_merged_corpora_keep_every_row_once_and_mix_them(tmp_path: Path) -> None:
    corpora = [
        load(text_file(tmp_path / f"{name}.txt", [name * 20 for _ in range(documents)]))
        for name, documents in (("a", 10), ("b", 30))
    ]
    merged = merge_corpora(corpora)
    for part in ("fit", "held_out"):
        packed = getattr(merged, part)
        rows = sorted(zip(packed.ids.tolist(), packed.mask.tolist(), strict=True))
        parts = [getattr(c, part) for c in corpora]
        assert rows == sorted(row for p in parts for row in zip(p.ids.tolist(), p.mask.tolist(), strict=True))
    assert merged.documents == 40
    assert all(c.id in merged.id for c in corpora)
    of_a = (merged.fit.ids == 1).any(-1)
    quarters = of_a.chunk(4)
    assert all(0 < int(q.sum()) < len(q) for q in quarters)


def test_corpora_with_rows_of_different_lengths_are_refused(tmp_path: Path) -> None:
    path = text_file(tmp_path / "text.txt")
    with pytest.raises(DataError, match=r"different lengths cannot be merged: \[8, 9\]"):
        merge_corpora([load(path), load(path, length=9)])
