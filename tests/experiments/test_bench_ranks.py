"""`experiments/studies/bench_ranks.py`: the engines that it starts, and refusals before it starts one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "experiments/studies/bench_ranks.py"


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The script with fakes for engines and processes: (layers read, policies, further arguments) of each call."""
    main = runpy.run_path(str(SCRIPT))["main"]
    calls = []

    def run_policies(folder: str, policies: dict[str, Any], batches: tuple[int, ...], **more: Any) -> list[Any]:
        calls.append((json.loads(Path(folder).read_text())["num_hidden_layers"], policies, {"B": batches, **more}))
        return []

    manager = SimpleNamespace(Barrier=threading.Barrier, Condition=threading.Condition, list=list)
    context = SimpleNamespace(Manager=lambda: contextlib.nullcontext(manager))
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr("sys.argv", ["bench_ranks.py", *args])
    for name, value in (("run_policies", run_policies), ("provenance", SimpleNamespace(append_rows=lambda *_: None))):
        monkeypatch.setitem(main.__globals__, name, value)
    main()
    return sorted(calls, key=lambda call: "enable_expert_parallel" in call[2])


def test_cases_start_the_engines_that_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, expert = run(monkeypatch, "--layers", "24", "--budget", "16", "11", "1", "--batch", "12")
    assert (tensor[0], expert[0]) == (24, 24)
    assert tensor[1] == {"base:budget=16": [16, 11, 1]}
    assert expert[1] == {
        "base:budget=16": [16, 11, 1], "base:budget=16,level=yes": [16, 11, 1], "base_ep:budget=8": [8, 5, 1],
    }  # fmt: skip
    for _, _, more in (tensor, expert):
        assert (more["baseline"], more["tensor_parallel_size"], more["B"]) == (True, 2, (12,))
        assert more["turn"].started.parties == 6
        assert more["compilation_config"] == {"cudagraph_capture_sizes": [8, 12]}
    [(layers, policies, more)] = run(monkeypatch, "--cases", "ep_rank")
    assert (layers, policies, more["baseline"], more["turn"].started.parties) == (
        48,
        {"base_ep:budget=8": [8, 5]},
        False,
        1,
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--cases", "ep_base", "tp_off"], "tp_off needs a case with a policy beside it"),
        (["--layers", "49"], "--layers 49 must be between 1 and 48, and the weights random"),
        (["demo", "--layers", "2"], "and the weights random"),
        ([], "6 engines take 211 GB on each GPU (30 GB of weights each), and one has 140: choose fewer --cases"),
    ],
)
def test_refused_cases_start_no_engine(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 140 * 10**9))
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *args)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err
