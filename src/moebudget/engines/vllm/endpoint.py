"""Entry point of `vllm.endpoint_plugins`: GET and POST /moebudget, and gauges in /metrics.

vLLM loads it only if VLLM_PLUGINS names it: `VLLM_PLUGINS=moebudget vllm serve ...`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import vllm
from fastapi import FastAPI, HTTPException, Request

from moebudget.engines.config import EXAMPLE
from moebudget.engines.vllm.compat import supported
from moebudget.engines.vllm.metrics import Gauges, agree
from moebudget.engines.vllm.plugin import SWITCH, switched_off
from moebudget.engines.vllm.rpc import read_change
from moebudget.methods.registry import parse

POLL_SECONDS = 10.0
log = logging.getLogger("vllm.moebudget")


class Endpoint:
    """Routes and gauges of one server, as vLLM's EndpointPlugin asks for them."""

    name = "moebudget"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None
        self.polling: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Register the two routes."""
        app.add_api_route("/moebudget", self.get, methods=["GET"])
        app.add_api_route("/moebudget", self.post, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002
        """Keep the engine client, and poll the workers' counters if this engine is capped."""
        self.engine = engine_client
        if self._unavailable() is None and (await self._states())[0] is not None:
            self.polling = asyncio.create_task(self._poll(Gauges()))

    async def get(self) -> dict[str, Any]:
        """Policy, budgets and counters."""
        return self._shown(await self._capped())

    async def post(self, request: Request) -> dict[str, Any]:
        """{"budget": 12 | [12, ...], "enabled": true} -> the new state. Answers 400 for anything else."""
        state = (await self._capped())[0]
        try:
            budgets, enabled = read_change(await request.json(), parse(state["policy"]), len(state["layers"]))
        except json.JSONDecodeError as error:
            raise HTTPException(400, f'the body is not JSON ({error}); send for example {{"budget": 12}}') from error
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        args = (None if budgets is None else list(budgets), enabled)
        return self._shown(await self.engine.collective_rpc("moebudget_set", args=args))

    def _unavailable(self) -> str | None:
        """Why no worker can be called; None if they can."""
        if switched_off():
            return f"moebudget is switched off by {SWITCH}=1"
        if not supported(vllm.__version__):
            return f"moebudget does not support vLLM {vllm.__version__} and does nothing"
        return "this server has no engine" if self.engine is None else None

    async def _states(self) -> list[Any]:
        return list(await self.engine.collective_rpc("moebudget_state"))

    async def _capped(self) -> list[dict[str, Any]]:
        """The ranks' states. HTTPException if no worker can be called, or the engine is not capped."""
        reason = self._unavailable()
        if reason is not None:
            raise HTTPException(503, reason)
        states = await self._states()
        if states[0] is None:
            raise HTTPException(404, f"this engine is not capped; start it with --additional-config '{EXAMPLE}'")
        return states

    @staticmethod
    def _shown(states: list[dict[str, Any]]) -> dict[str, Any]:
        return {**states[0], "ranks": len(states), "ranks_agree": agree(states)}

    async def _poll(self, gauges: Gauges) -> None:
        """Update the gauges every few seconds."""
        while True:
            try:
                gauges.show(await self._states())
            except Exception:
                log.exception("moebudget: cannot read the workers' counters; the gauges keep their values")
            await asyncio.sleep(POLL_SECONDS)
