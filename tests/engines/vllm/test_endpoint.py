"""The endpoint of a server without a capped engine: the answer gives the reason, and the server still starts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Engine:
    """An engine client whose workers are not capped."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[None]:  # noqa: ARG002
        return [None]


def refusal(engine: Any) -> tuple[int, str]:
    """Status and reason of GET /moebudget after start-up with this engine client."""
    from fastapi import HTTPException

    from moebudget.engines.vllm.endpoint import Endpoint

    async def answer() -> tuple[int, str]:
        endpoint = Endpoint()
        await endpoint.init_state(engine, None, None)
        assert endpoint.polling is None
        with pytest.raises(HTTPException) as caught:
            await endpoint.get()
        return caught.value.status_code, caught.value.detail

    return asyncio.run(answer())


def test_server_without_a_capped_engine_says_so() -> None:
    assert refusal(None) == (503, "this server has no engine")
    status, reason = refusal(Engine())
    assert (status, "this engine is not capped; start it with" in reason) == (404, True)


def test_server_of_an_unsupported_version_does_not_call_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    assert refusal(Engine()) == (503, "moebudget does not support vLLM 0.34.0 and does nothing")


def test_answer_names_the_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBUDGET_DISABLE", "1")
    assert refusal(Engine()) == (503, "moebudget is switched off by MOEBUDGET_DISABLE=1")
