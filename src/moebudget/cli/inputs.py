"""Inputs of a command: model, statistics, text and task items, from files or the demo, checked before the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from torch import Tensor, nn

    from moebudget.core.policy import Policy
    from moebudget.core.stats import ModelFacts, Stats

DEMO = "demo"
DEMO_TOKENS = 30_000  # calibration tokens of the demo's statistics
DEMO_STATS = "demo-stats.safetensors"

AnyModel = Annotated[
    str, typer.Argument(help="Transformers checkpoint: a folder or a hub name; or `demo`, the model in the package.")
]
HeldOutData = Annotated[str, typer.Option(help="Held-out text: file, .jsonl, folder or hub data set.")]
DataOption = Annotated[
    str | None,
    typer.Option(help="Held-out text: file, .jsonl, folder or hub data set. Default: none, except for `demo`."),
]
OptionalStats = Annotated[
    Path | None,
    typer.Option(
        help="Statistics file written by `moebudget calibrate`. Default: none; `demo` is calibrated if necessary."
    ),
]
TasksOption = Annotated[
    Path | None,
    typer.Option(
        help="Task items: one JSON object per line with task, prompt and target (the exact continuation). Default: "
        "none, except for `demo`."
    ),
]
PoliciesOption = Annotated[
    list[str],
    typer.Option(help="Policy string, such as base:budget=10 (see `moebudget policies`); repeat the option for more."),
]
ItemsOption = Annotated[int, typer.Option(min=0, help="Items of each of the nine tasks of `demo`.")]
SlicesOption = Annotated[
    str | None,
    typer.Option(
        help="Field of the .jsonl text that names a row's slice, such as lang; for `demo` domain or lang. Each slice "
        "gets its own result. Default: no slices."
    ),
]
VllmOption = Annotated[
    str, typer.Option("--vllm", help="Arguments of vLLM's LLM, as a JSON object such as '{\"enforce_eager\": true}'.")
]
OutOption = Annotated[Path, typer.Option(help="Folder for the command's output and the demo's statistics.")]


@dataclass(slots=True)
class Inputs:
    """Inputs of a measurement, read before the weights."""

    name: str  # the model's name in rows
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
    slices: tuple[str, ...] = ()  # the slice of each window, if a field names it

    @property
    def is_demo(self) -> bool:
        return self.path != self.name

    def require(self, policy: str, needs: Iterable[str]) -> None:
        """Raise MissingStatisticError for tensors that neither the statistics hold nor `load` will make."""
        from moebudget.core.stats import require_stats

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
        """The model; if the demo has no statistics and a policy needs them, calibrate first."""
        from moebudget.engines.transformers.loading import load_model, vocabulary

        model, _ = load_model(self.path, device=self.device, dtype=self.dtype, stats=self.stats)
        if self.stats is None and self.stats_file is not None and any(p.needs for p in policies):
            from moebudget.calibrate import calibrate
            from moebudget.demo.run import BATCH, NAME, calibration_corpus

            corpus = calibration_corpus(self.tokenizer, vocabulary(model), DEMO_TOKENS)
            self.stats = calibrate(model, corpus, model_id=NAME, budget=10, batch=BATCH)
            self.stats_file.parent.mkdir(parents=True, exist_ok=True)
            self.stats.save(self.stats_file)
            note(f"wrote statistics from {DEMO_TOKENS:,} tokens to {self.stats_file}; the next run reads them")
        return model


def note(text: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)


def json_object(text: str) -> dict[str, Any]:
    """The object in the text of --vllm. Raises ValueError if it is not one."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--vllm {text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f'--vllm {text!r} must be an object, such as {{"enforce_eager": true}}')
    return value


def require_folder(output: Path) -> None:
    """Raise FileNotFoundError if the folder of an output file does not exist; call it before the slow step."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder {output.parent} for {output.name} does not exist; make it first")


def load_with_windows(
    model: str, stats: Stats | None, data: str, length: int, windows: int, device: str | None, dtype: str | None
) -> tuple[Any, Any, Tensor, str]:
    """The model, its tokenizer, windows of text [n, length + 1], and the device in use."""
    from moebudget.engines.transformers import loading
    from moebudget.evaluate.corpus import read_windows

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
    """Everything but the weights. Without `tasks`, the model `demo` gets `demo_items` of each of its tasks.

    Raises ValueError without a text, and the errors of reading each input.
    """
    from moebudget.core.stats import load_stats
    from moebudget.demo import run as demo
    from moebudget.demo.tasks import load_items
    from moebudget.engines.transformers import loading
    from moebudget.engines.transformers.families import facts_of
    from moebudget.evaluate.corpus import read_sliced, read_windows

    embedded = model == DEMO
    if data is None and not embedded:
        raise ValueError(f"there is no text: use --data held-out.txt (only the model {DEMO!r} includes a text)")
    if data is None and slices not in (None, "domain", "lang"):
        raise ValueError(f"--slices {slices}: the demo has slices by domain, or by lang in another of its texts")
    if data is None and slices == "lang":
        data = str(demo.LANGUAGES)
        note(f"{demo.NAME} was trained on English and code only: other languages are outside its domain")
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
