"""OpenAI-compatible server: concurrent completions, the endpoint and the gauges; all tests share one server."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from moebudget.engines.config import read_settings
from tests.engines.vllm.checkpoints import LAYERS
from tests.engines.vllm.conftest import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class Server:
    """Client of one server; answers are (status, body)."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = Request(f"{self.root}{path}", data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=60) as answer:
                status, text = answer.status, answer.read().decode()
        except HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith(("{", "[")) else text

    def complete(self, number: int, **more: Any) -> tuple[int, Any]:
        prompt = [(7 * number + j) % 250 + 3 for j in range(6 + number)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        return self.ask("/v1/completions", {**body, "return_token_ids": True, **more})

    def complete_eight(self) -> list[int]:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(self.complete, range(8)))
        assert [status for status, _ in answers] == [200] * 8, answers[0][1]
        return [len(body["choices"][0]["token_ids"]) for _, body in answers]

    def counters(self) -> dict[str, float]:
        return self.ask("/moebudget")[1]["counters"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    extra = {"moebudget": {"policy": "squared:budget=6"}}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoints / "qwen3"),
        "--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1", "--skip-tokenizer-init",
        "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "8", "--additional-config", json.dumps(extra),
    ]  # fmt: skip
    env = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "moebudget", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as out, subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out) as process:
        client = Server(port)
        for _ in range(480):
            time.sleep(0.5)
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                if client.ask("/health")[0] == 200:
                    break
            except URLError:
                continue
        else:
            pytest.fail(log.read_text()[-4000:])
        try:
            yield client
        finally:
            process.terminate()
            process.wait(60)


def test_budget_holds_while_requests_run_together(server: Server) -> None:
    before = server.counters()
    assert server.complete_eight() == [24] * 8
    after = server.counters()
    steps, fetched = (after[name] - before[name] for name in ("steps", "fetched"))
    assert steps > 0
    assert fetched <= 6 * steps


def test_budget_posted_while_requests_run_takes_effect(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete_eight)
        status, state = server.ask("/moebudget", {"budget": 4})
        assert running.result() == [24] * 8
    assert (status, state["budgets"]) == (200, [4] * LAYERS)
    before = server.counters()
    server.complete_eight()
    after = server.counters()
    steps, fetched, native = (after[name] - before[name] for name in ("steps", "fetched", "native_union"))
    assert fetched <= 4 * steps < native


def test_budget_list_and_switch_are_set_over_http(server: Server) -> None:
    status, state = server.ask("/moebudget", {"budget": [5, 6, 7], "enabled": False})
    assert (status, state["budgets"], state["enabled"]) == (200, [5, 6, 7], False)
    before = server.counters()
    server.complete_eight()
    assert server.counters() == before
    assert server.ask("/moebudget", {"enabled": True})[1]["enabled"]
    state = server.ask("/moebudget")[1]
    assert (state["budgets"], state["ranks"], state["ranks_agree"]) == ([5, 6, 7], 1, True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"budget": 0}, "budget=0 must be a whole number of at least 1"),
        ({"budget": [1, 2]}, f"2 budgets were given and the model has {LAYERS}"),
        ({"bugdet": 4}, "unknown key 'bugdet' (did you mean 'budget'?)"),
        ({"enabled": "no"}, "enabled='no' must be true or false"),
        (b"{budget: 4}", "the body is not JSON"),
    ],
)
def test_wrong_request_is_refused_and_changes_nothing(server: Server, body: Any, message: str) -> None:
    before = server.ask("/moebudget")[1]
    status, answer = server.ask("/moebudget", body)
    assert status == 400
    assert message in answer["error"]["message"] if "error" in answer else message in answer["detail"]
    assert server.ask("/moebudget")[1] == before


def test_request_that_opts_out_is_not_counted(server: Server) -> None:
    before = server.counters()
    assert server.complete(3, vllm_xargs={"moebudget": False})[0] == 200
    assert server.counters() == before
    assert server.complete(3)[0] == 200
    assert server.counters() != before


def test_wrong_opt_out_is_refused(server: Server) -> None:
    status, answer = server.complete(3, vllm_xargs={"moebudget": "no"})
    assert status == 400
    assert "extra_args['moebudget']='no' must be false" in json.dumps(answer)


def test_metrics_have_sixteen_gauges(server: Server) -> None:
    server.ask("/moebudget", {"budget": 6, "enabled": True})
    server.complete_eight()
    steps = server.counters()["steps"]
    for _ in range(30):
        lines = [line for line in server.ask("/metrics")[1].splitlines() if line.startswith("moebudget_")]
        values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
        if values.get("moebudget_steps") == steps:
            break
        time.sleep(0.5)
    assert values["moebudget_steps"] == steps
    assert values["moebudget_enabled"] == values["moebudget_ranks_agree"] == 1
    assert values['moebudget_budget{bound="max"}'] == 6
    assert values["moebudget_fetched_mean"] <= 6
    assert len(values) == 16


def shell_commands() -> list[list[str]]:
    """The commands of examples/serve_vllm.md, as words."""
    page = (ROOT / "examples/serve_vllm.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line) for line in blocks.splitlines() if line.strip()]


def test_served_example_starts_with_settings_that_are_read() -> None:
    (command,) = (words for words in shell_commands() if "serve" in words)
    assert command[:4] == ["VLLM_PLUGINS=moebudget", "vllm", "serve", "MODEL"]
    settings = read_settings(json.loads(command[command.index("--additional-config") + 1]))
    assert settings is not None
    assert settings.policy.budget == 16


def test_served_example_sends_requests_that_are_answered(server: Server) -> None:
    budgets, enabled = [], []
    for words in (words for words in shell_commands() if words[0] == "curl"):
        (address,) = (word for word in words if word.startswith("localhost:8000"))
        body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
        if body is not None and "model" in body:  # the tiny model has no tokenizer
            body |= {"model": "tiny", "prompt": [5, 6, 7, 8]}
        status, answer = server.ask(address.removeprefix("localhost:8000"), body)
        assert status == 200, answer
        if "budgets" in answer:
            budgets.append(answer["budgets"][0])
            enabled.append(answer["enabled"])
    assert budgets[1:] == [10, 10, 10]
    assert enabled == [True, True, False, True]
