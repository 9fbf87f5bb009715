"""lm-evaluation-harness with this package's model class and tasks, on a tiny model that decodes freely."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moebudget import parse
from moebudget.demo.run import MODEL
from moebudget.evaluate.likelihood import score_continuations
from moebudget.evaluate.lm_eval.items import TASKS, load_items
from moebudget.evaluate.lm_eval.run import FOLDER
from moebudget.evaluate.lm_eval.scoring import gold
from tests.cli.test_cli import refused, run, save_model
from tests.evaluate.lm_eval.questions import ITEMS

pytestmark = [
    pytest.mark.lm_eval,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def load_lm(model: Path, **settings: Any) -> Any:
    from moebudget.evaluate.lm_eval.model import BudgetLM

    return BudgetLM(**{"pretrained": str(model), "device": "cpu", "batch_size": 4, **settings})


def manager(folder: Path, tasks: Path = FOLDER) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(tasks), include_defaults=False, metadata={"items": str(folder)})


def task_of(name: str, folder: Path) -> Any:
    from lm_eval.tasks import get_task_dict

    return get_task_dict([f"moebudget_{name}"], manager(folder))[f"moebudget_{name}"]


def evaluated(lm: Any, tasks: list[str], folder: Path, **settings: Any) -> Any:
    from lm_eval import simple_evaluate

    return simple_evaluate(
        model=lm,
        tasks=tasks,
        task_manager=manager(folder),
        bootstrap_iters=0,
        confirm_run_unsafe_code=True,
        **settings,
    )


def answering(right: bool) -> Any:
    """A model that answers with the gold answer of the item, or with nonsense; it checks the requests."""
    from lm_eval.api.model import LM

    class Answers(LM):  # type: ignore[misc]
        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            answers = []
            for request in requests:
                prompt, settings = request.args
                task = request.task_name.removeprefix("moebudget_")
                doc = request.doc
                assert str(next(iter(doc[key] for key in ("prompt", "Question", "text") if key in doc), "")) in prompt
                assert settings["until"]
                assert not settings["do_sample"]
                answers.append(gold(task, doc) if right else "zzz")
            return answers

        loglikelihood = loglikelihood_rolling = None

    Answers.__abstractmethods__ = frozenset()
    return Answers()


def test_gold_answers_score_one_in_the_harness(folder: Path) -> None:
    names = [f"moebudget_{task}" for task in TASKS]
    correct = evaluated(answering(True), names, folder)
    assert {name: correct["results"][name]["acc,none"] for name in names} == dict.fromkeys(names, 1.0)
    wrong = evaluated(answering(False), names, folder)
    assert {name: wrong["results"][name]["acc,none"] for name in names} == dict.fromkeys(names, 0.0)


def test_prompts_hide_their_answers(folder: Path) -> None:
    for task in TASKS:
        loaded = task_of(task, folder)
        for doc in loaded.test_docs():
            text = loaded.doc_to_text(doc)
            item = {field: doc[field] for field in TASKS[task].fields}
            assert "{{" not in text
            hidden = gold(task, item)
            assert task in ("boolq", "bbh", "cmmlu", "math401") or hidden not in text


@pytest.mark.parametrize("mixed", [True, False])
def test_answers_equal_decoding_in_the_same_order(folder: Path, mixed: bool) -> None:
    from moebudget.evaluate.decode import decode

    lm = load_lm(MODEL, policy="squared:budget=6", batch_size=4, mixed=mixed)
    results = evaluated(lm, ["moebudget_bbh"], folder, gen_kwargs={"max_gen_toks": 5}, log_samples=True)
    samples = results["samples"]["moebudget_bbh"]
    order = list(range(6))
    if mixed:
        random.Random(0).shuffle(order)
    requests = [lm._request(*samples[i]["arguments"][0]) for i in order]
    again = decode(lm.model, parse("squared:budget=6"), None, requests, lm.tokenizer, batch=4, quiet=True)
    assert [samples[i]["resps"][0][0] for i in order] == again.texts
    assert len(set(again.texts)) > 3
    counted = results["config"]["moebudget"]
    assert counted["policy"] == "squared:budget=6"
    assert counted["full"]["rows_per_step"] == 4
    assert 5 < counted["full"]["fetched"] <= 6 < counted["full"]["native_union"]
    assert counted["full"]["steps"] * 4 + round(counted["tail"]["rows_per_step"] * counted["tail"]["steps"]) == sum(
        map(len, again.tokens)
    )


def test_choices_are_scored_in_decode_steps(model: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.yaml").write_text(
        "task: letters\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/letters.jsonl}}}}\n"
        'doc_to_text: "{{q}}"\ndoc_to_choice: ["A", "B", "C D"]\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n'
    )
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps({"q": f"Question {i}:"}) + "\n" for i in range(3)))
    from lm_eval import simple_evaluate

    lm = load_lm(model, policy="squared:budget=2")
    results = simple_evaluate(
        model=lm, tasks=["letters"], task_manager=manager(tmp_path, tmp_path), bootstrap_iters=0, log_samples=True
    )
    samples = results["samples"]["letters"]
    pairs = [lm._encode_pair(*arguments) for s in samples for arguments in s["arguments"]]
    values, counters = score_continuations(lm.model, parse("squared:budget=2"), None, pairs, batch=4, quiet=True)
    scored = [response for s in samples for response in s["filtered_resps"]]
    assert [float(value) for value, _ in scored] == pytest.approx([value for value, _ in values])
    assert results["config"]["moebudget"]["loglikelihood"]["fetched"] == counters.fetched == 2
    native, _ = score_continuations(lm.model, parse("native"), None, pairs, batch=4, quiet=True)
    assert [value for value, _ in native] != pytest.approx([value for value, _ in values])


def test_impossible_arguments_are_refused_before_loading(model: Path, tmp_path: Path) -> None:
    cases = {
        "needs pretrained": {"pretrained": ""},
        "unknown argument of model moebudget 'policee'.*policy": {"policee": "native"},
        "batch_size=auto must be a whole number": {"batch_size": "auto"},
        "batch_size=0 must be": {"batch_size": 0},
        "unknown policy": {"policy": "nonsense"},
    }
    for message, settings in cases.items():
        with pytest.raises(ValueError, match=message):
            load_lm(tmp_path / "none", **settings)
    assert load_lm(model, policy="squared:budget=2;fill=drop").policy.name == "squared:budget=2,fill=drop"


def test_sampling_and_rolling_likelihoods_are_refused(model: Path) -> None:
    lm = load_lm(model)
    with pytest.raises(ValueError, match="decodes greedily"):
        lm._request("text", {"do_sample": True, "until": []})
    with pytest.raises(ValueError, match="all prefill, where a policy does nothing"):
        lm.loglikelihood_rolling([])


def test_long_prompt_loses_its_beginning(model: Path) -> None:
    lm = load_lm(model, max_length=12)
    request = lm._request("one two three four five six seven eight nine ten", {"max_gen_toks": 4, "until": "\n"})
    assert request.stops == ("\n",)
    assert list(request.prompt) == lm.tok_encode("one two three four five six seven eight nine ten")[-8:]
    assert lm.counted()["prompts_cut"] == 1
    assert len(lm._request("", {} | {"max_gen_toks": 2}).prompt) == 2
    with pytest.raises(ValueError, match="answer of 11 tokens leaves no room"):
        lm._request("one two", {"max_gen_toks": 11})


def test_command_prints_rows_and_appends_them(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["--items", folder, "--batch", 2, "--tokens", 3, "--device", "cpu", "--results", rows, "--unsafe-code"]
    tasks = [x for task in ("gsm8k", "bbh", "mbpp") for x in ("--task", task)]
    assert run(["lm-eval", model, "--policy", "squared:budget=1", *tasks, *options]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [json.loads(line) for line in rows.read_text().splitlines()] == printed
    assert [row["policy"] for row in printed] == ["native", "squared:budget=1"]
    assert printed[1]["fetched"] == 1 < printed[0]["fetched"]
    assert printed[0]["items"] == {"gsm8k": 2, "bbh": 6, "mbpp": 1}
    assert printed[0]["rows_per_step"] == 2
    assert {"commit", "device", "versions", "command"} <= printed[0].keys()


def test_broken_input_is_refused_before_loading(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["lm-eval", tmp_path / "no-model", "--policy", "native"]
    refused([*command, "--task", "mbpp", "--items", folder], capsys, "mbpp would execute code", "--unsafe-code")
    refused([*command, "--task", "gsm8"], capsys, "gsm8")
    refused([*command, "--task", "gsm8k", "--items", tmp_path], capsys, "holds neither gsm8k_test.jsonl")
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps({"question": "q"}) + "\n")
    refused(
        [*command, "--task", "gsm8k", "--items", tmp_path], capsys, "gsm8k_test.jsonl, line 1", "'answer'", "missing"
    )


def test_code_tasks_need_permission(model: Path, folder: Path) -> None:
    from lm_eval import simple_evaluate

    with pytest.raises(ValueError, match="marked as unsafe"):
        simple_evaluate(model=load_lm(model), tasks=["moebudget_mbpp"], task_manager=manager(folder))


def test_harness_command_line_knows_the_model(folder: Path, model: Path, tmp_path: Path) -> None:
    arguments = [
        "run",
        "--model",
        "moebudget",
        "--model_args",
        f"pretrained={model},policy=squared:budget=2,items={folder}",
    ]
    arguments += [
        "--tasks",
        "moebudget_math401",
        "--batch_size",
        "2",
        "--device",
        "cpu",
        "--gen_kwargs",
        "max_gen_toks=3",
    ]
    command = [sys.executable, "-m", "moebudget.evaluate.lm_eval", *arguments, "--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.rglob("results_*.json")
    stored = json.loads(path.read_text())["config"]["moebudget"]
    assert stored["batch"] == 2
    assert stored["full"]["fetched"] == 2


def test_items_reach_the_harness_unchanged(folder: Path) -> None:
    task = task_of("bbh", folder)
    assert list(task.test_docs()) == load_items("bbh", folder)
    assert len(ITEMS["bbh"]) == len(task.test_docs())
    assert torch.is_grad_enabled()  # the harness must not switch it off for other tests
