"""Model, statistics, text and items of a command, from files or of the demo; what can be refused comes first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from torch import Tensor, nn

    from moebudget.policy import Policy
    from moebudget.stats import ModelFacts, Stats

DEMO = "demo"
DEMO_TOKENS = 30_000  # that its statistics are calibrated on
DEMO_STATS = "demo-stats.safetensors"

AnyModel = Annotated[
    str, typer.Argument(help="A transformers checkpoint: a folder or a hub name; or `demo`, the one in the package.")
]
DataOption = Annotated[str | None, typer.Option(help="Held-out text: file, .jsonl, folder or hub data set.")]
StatsOption = Annotated[Path | None, typer.Option(help="Statistics made by `moebudget calibrate`.")]
TasksOption = Annotated[
    Path | None,
    typer.Option(help="Task items, one JSON object a line with task, prompt and target (the exact continuation)."),
]
ItemsOption = Annotated[int, typer.Option(min=0, help="Items of each of the nine tasks, for `demo`.")]
SlicesOption = Annotated[
    str | None,
    typer.Option(help="The field of a .jsonl text's rows that names their slice, as lang; the demo has domain, lang."),
]
OutOption = Annotated[Path, typer.Option(help="Folder for what the command writes, and for the demo's statistics.")]


@dataclass(slots=True)
class Inputs:
    """What a command measures on, read before the weights."""

    name: str  # of the model, in rows
    path: str
    facts: ModelFacts
    tokenizer: Any
    start_id: int | None
    windows: Tensor
    items: list[Any]
    stats: Stats | None
    stats_file: Path | None  # where the statistics are, or will be
    device: str
    dtype: str
    slices: tuple[str, ...] = ()  # of each window, if a field names them

    @property
    def is_demo(self) -> bool:
        return self.path != self.name

    def require(self, policy: str, needs: Iterable[str]) -> None:
        """Raise MissingStatisticError for what a policy reads and neither the statistics nor `load` will hold."""
        from moebudget.stats import require_stats

        needs = frozenset(needs)
        if self.stats is not None:
            self.stats.check(self.stats.facts, needs)
        elif not needs <= self.held:
            require_stats(policy, needs, None)

    @property
    def held(self) -> frozenset[str]:
        """The tensors that the statistics hold, or will hold once `load` has calibrated the demo."""
        from moebudget.calibrate.run import DEFAULT_NEEDS

        calibrated = DEFAULT_NEEDS if self.is_demo else frozenset[str]()
        return calibrated if self.stats is None else frozenset(self.stats.tensors)

    def load(self, policies: Iterable[Policy]) -> nn.Module:
        """The model; for `demo`, calibrates the statistics if a policy needs them and there are none."""
        from moebudget.integrations.loading import load_model, vocabulary

        model, _ = load_model(self.path, device=self.device, dtype=self.dtype, stats=self.stats)
        if self.stats is None and self.stats_file is not None and any(p.needs for p in policies):
            from moebudget.calibrate import calibrate
            from moebudget.demo.run import BATCH, NAME, calibration_corpus

            corpus = calibration_corpus(self.tokenizer, vocabulary(model), DEMO_TOKENS)
            self.stats = calibrate(model, corpus, model_id=NAME, budget=10, batch=BATCH)
            self.stats_file.parent.mkdir(parents=True, exist_ok=True)
            self.stats.save(self.stats_file)
            note(f"statistics from {DEMO_TOKENS:,} tokens: {self.stats_file}, which the next run reads")
        return model


def note(text: str) -> None:
    """A line for people, beside the output."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)


def require_folder(output: Path) -> None:
    """FileNotFoundError if a file could not be written for want of its folder; before the slow step."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder {output.parent} for {output.name} does not exist; make it first")


def load_with_windows(
    model: str, stats: Stats | None, data: str, length: int, windows: int, device: str | None, dtype: str | None
) -> tuple[Any, Any, Tensor, str]:
    """The model, its tokenizer, windows of text [n, length + 1], and the device that was given or chosen."""
    from moebudget.evaluate.windows import read_windows
    from moebudget.integrations import loading

    device = loading.default_device() if device is None else device
    dtype = loading.default_dtype(device) if dtype is None else dtype
    loaded, tokenizer = loading.load_model(model, device=device, dtype=dtype, stats=stats)
    text = read_windows(data, tokenizer, loading.vocabulary(loaded), length, windows, tokenizer.eos_token_id)
    return loaded, tokenizer, text, device


def read_inputs(
    model: str,
    *,
    data: str | None,
    stats: Path | None,
    tasks: Path | None,
    demo_items: int,
    windows: int,
    length: int,
    out: Path | None,
    device: str | None,
    dtype: str | None,
    slices: str | None = None,
) -> Inputs:
    """Everything but the weights. `demo_items` of each task stand for `tasks` if the model is `demo`.

    Raises ValueError without a text, and what reading each of them raises.
    """
    from moebudget.demo import run as demo
    from moebudget.demo.tasks import load_items
    from moebudget.evaluate.windows import read_sliced, read_windows
    from moebudget.integrations import loading
    from moebudget.integrations.families import facts_of
    from moebudget.stats import load_stats

    embedded = model == DEMO
    if data is None and not embedded:
        raise ValueError(f"which text? --data held-out.txt (model {DEMO!r} brings its own)")
    if data is None and slices not in (None, "domain", "lang"):
        raise ValueError(f"--slices {slices}: the demo's own text has slices by domain, another of its files by lang")
    if data is None and slices == "lang":
        data = str(demo.LANGUAGES)
        note(f"{demo.NAME} was trained on English and code alone: other languages are out of its domain")
    file = stats
    if stats is None and embedded and out is not None:
        file = out / DEMO_STATS
    known = None if file is None or (file != stats and not file.is_file()) else load_stats(file)
    items = load_items(tasks) if tasks is not None else demo.demo_items(demo_items) if embedded else []
    device = loading.default_device() if device is None else device
    dtype = loading.default_dtype(device) if dtype is None else dtype
    path = str(demo.MODEL) if embedded else model
    empty = loading.skeleton(path)
    tokenizer, entries = loading.load_tokenizer(path), loading.vocabulary(empty)
    names: tuple[str, ...] = ()
    if data is None:
        text, domains = demo.heldout_slices(tokenizer, entries, windows, length)
        names = () if slices is None else domains
    elif slices is not None:
        text, names = read_sliced(data, tokenizer, entries, length, windows, tokenizer.eos_token_id, slices)
    else:
        text = read_windows(data, tokenizer, entries, length, windows, tokenizer.eos_token_id)
    return Inputs(
        name=demo.NAME if embedded else model,
        path=path,
        facts=facts_of(empty),
        tokenizer=tokenizer,
        start_id=tokenizer.eos_token_id if embedded else tokenizer.bos_token_id,
        windows=text,
        items=list(items),
        stats=known,
        stats_file=file,
        device=device,
        dtype=dtype,
        slices=names,
    )
