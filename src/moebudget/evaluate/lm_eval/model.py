"""Model class `moebudget` for lm-evaluation-harness: every answer token is a decode step of a real batch."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from moebudget.core.counters import Counters
from moebudget.core.errors import unknown
from moebudget.core.stats import load_stats, require_stats
from moebudget.engines.transformers.loading import default_device, default_dtype, load_model
from moebudget.evaluate.decode import Decoded, Request, decode
from moebudget.evaluate.likelihood import score_continuations
from moebudget.methods.registry import parse

log = logging.getLogger(__name__)
MOST = 256  # tokens per answer if the task sets no limit
ARGUMENTS = (
    "pretrained", "policy", "stats", "batch_size", "constant", "device", "dtype", "max_length", "max_gen_toks",
    "add_bos_token", "mixed",
)  # fmt: skip
ELSEWHERE = ("items", "max_batch_size")  # arguments of the tasks, and of automatic batch sizes


@register_model("moebudget")
class BudgetLM(TemplateLM):  # type: ignore[misc]
    """A transformers model under a policy.

    pretrained: a checkpoint folder or hub name. policy: a policy string with `;` instead of commas, at which the
    harness splits arguments: `base:budget=10;fill=drop`. stats: a file made by `moebudget calibrate`. batch_size: rows
    per decode step. constant: refill finished rows at once (else batches drain). max_length: tokens of prompt and
    answer together; longer prompts lose their beginning. add_bos_token: put the BOS token before every prompt. mixed:
    answer the requests in a random order (seed 0), as a server would see them, instead of task by task.

    Raises ValueError for unknown or impossible arguments, before any weights are read.
    """

    def __init__(
        self,
        pretrained: str = "",
        policy: str = "native",
        stats: str | None = None,
        batch_size: int | str = 16,
        constant: bool = True,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = MOST,
        add_bos_token: bool = False,
        mixed: bool = True,
        **more: Any,
    ) -> None:
        super().__init__()
        for name in more:
            if name not in ELSEWHERE:
                raise ValueError(unknown("argument of model moebudget", name, list(ARGUMENTS)))
        if not pretrained:
            raise ValueError("model moebudget needs pretrained=, a checkpoint folder or a hub name")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(
                f"batch_size={batch_size} must be a whole number of at least 1: results depend on the batch size"
            )
        self.policy = parse(policy.replace(";", ","))
        self.stats = None if stats is None else load_stats(stats)
        require_stats(self.policy.name, self.policy.needs, self.stats)
        self.batch_size, self.constant, self.max_gen_toks = int(batch_size), constant, int(max_gen_toks)
        if self.batch_size == 1 and self.policy.name != "native":
            log.warning("batch_size=1: a decode step has one row, so there are no rows to share experts")
        where = default_device() if device is None else device
        dtype = default_dtype(where) if dtype is None else dtype
        self.model, self.tokenizer = load_model(pretrained, device=where, dtype=dtype, stats=self.stats)
        self.pretrained, self.where, self.add_bos_token = pretrained, where, add_bos_token
        config: Any = self.model.config
        limit = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.mixed = mixed
        self.max_length = int(max_length or limit or 2048)
        self.cut = 0  # prompts that lost their beginning
        self.decoded: list[Decoded] = []
        self.scored: list[Counters] = []

    def use(self, policy: str) -> None:
        """Change the policy and reset all counts."""
        self.policy = parse(policy)
        require_stats(self.policy.name, self.policy.needs, self.stats)
        self.cut, self.decoded, self.scored = 0, [], []

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return self.pretrained.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text; by default with the special tokens that the tokenizer adds."""
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids = [int(i) for i in self.tokenizer(string, **special)["input_ids"]]
        first = self.add_bos_token and add_special_tokens is not False and ids[:1] != [self.prefix_token_id]
        return [self.prefix_token_id, *ids] if first else ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers. ValueError if a task asks for sampling."""
        order = list(range(len(requests)))
        if self.mixed:
            random.Random(0).shuffle(order)
        wanted = [self._request(*requests[i].args) for i in order]
        decoded = decode(
            self.model, self.policy, self.stats, wanted, self.tokenizer,
            batch=self.batch_size, constant=self.constant, quiet=disable_tqdm,
        )  # fmt: skip
        self.decoded.append(decoded)
        texts = dict(zip(order, decoded.texts, strict=True))
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[i])
        log.info("%s", self.said())
        return [texts[i] for i in range(len(requests))]

    def _request(self, context: str, settings: dict[str, Any]) -> Request:
        if settings.get("do_sample") or settings.get("temperature"):
            raise ValueError(f"model moebudget decodes greedily, but the task asks for sampling: {settings}")
        until = settings.get("until") or []
        stops = tuple([until] if isinstance(until, str) else until)
        most = int(settings.get("max_gen_toks", settings.get("max_new_tokens", self.max_gen_toks)))
        return Request(tuple(self._fit(self.tok_encode(context), most)), most, stops)

    def _fit(self, prompt: list[int], most: int) -> list[int]:
        room = self.max_length - most
        if room < 2:
            raise ValueError(f"an answer of {most} tokens leaves no room for a prompt in max_length={self.max_length}")
        if len(prompt) > room:
            self.cut += 1
            if self.cut == 1:
                log.warning("a prompt of %d tokens loses its beginning: %d fit", len(prompt), room)
            prompt = prompt[-room:]
        return [*[self.prefix_token_id] * (2 - len(prompt)), *prompt]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Continuations are decode steps of teacher-forced rows, as `moebudget eval` scores tasks."""
        pairs = [(self._fit(context, len(answer)), answer) for _, context, answer in requests]
        scores, counters = score_continuations(
            self.model, self.policy, self.stats, pairs, batch=self.batch_size, quiet=disable_tqdm
        )
        self.scored.append(counters)
        for (texts, _context, _answer), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Refused with ValueError: a document has no prompt, so every token would be prefill."""
        raise ValueError(
            "rolling log-likelihoods are all prefill, where a policy does nothing, so they would be those of native "
            "routing; use moebudget eval --data to measure the loss of a text in decode mode"
        )

    def get_model_info(self) -> dict[str, Any]:
        """Fields that the harness stores with its results."""
        return {
            "moebudget": {"policy": self.policy.name, "batch": self.batch_size, "mixed": self.mixed, **self.counted()}
        }

    def counted(self) -> dict[str, Any]:
        """Rows and experts per step in full batches, in the draining tail, and in log-likelihoods."""
        parts = [("full", d.full) for d in self.decoded] + [("tail", d.tail) for d in self.decoded]
        parts += [("loglikelihood", c) for c in self.scored]
        counts: dict[str, Any] = {"constant": self.constant, "prompts_cut": self.cut}
        for name in ("full", "tail", "loglikelihood"):
            named = [c for part, c in parts if part == name and c is not None]
            if named:
                steps, rows = sum(c.steps for c in named), sum(c.totals["rows"] for c in named)
                total = sum(c.totals["steps"] for c in named)
                counts[name] = {"steps": steps, "rows_per_step": rows / total}
                counts[name] |= {key: sum(c.totals[key] for c in named) / total for key in ("fetched", "native_union")}
        return counts

    def said(self) -> str:
        """The counts of `counted` in words."""
        names = {
            "full": f"batches of {self.batch_size}",
            "tail": "draining tail",
            "loglikelihood": "scored answers",
        }
        counted = self.counted()
        parts = [
            f"{label}: {c['steps']} steps of {c['rows_per_step']:.1f} rows, {c['fetched']:.1f} experts fetched, "
            f"{c['native_union']:.1f} by native routing"
            for name, label in names.items()
            if (c := counted.get(name))
        ]
        return "; ".join([self.policy.name, *parts])
