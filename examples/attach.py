"""Cap the experts of a transformers model while it generates.

    python examples/attach.py                                   # the small model that ships with moebudget
    python examples/attach.py MODEL --stats stats.safetensors   # yours, calibrated by `moebudget calibrate MODEL`

Needs `pip install 'moebudget[hf]'`.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moebudget
from moebudget.demo.run import MODEL as DEMO

PROMPTS = ["The ship left the harbour", "She opened the letter and", "def add(a, b):", "In the morning the king"]


def main() -> None:
    """Generate with native routing and with a budget, and print what was fetched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(DEMO))
    parser.add_argument("--policy", help="default: base:budget=10 with statistics, squared:budget=10 without")
    parser.add_argument("--stats")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate per prompt")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto").eval()
    batch = tokenizer(PROMPTS * 4, return_tensors="pt", padding=True, return_token_type_ids=False)
    settings = {"max_new_tokens": arguments.tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

    stats = moebudget.load_stats(arguments.stats) if arguments.stats else None
    capped = arguments.policy or ("base:budget=10" if stats is not None else "squared:budget=10")
    for policy in ("native", capped):
        with torch.no_grad(), moebudget.attach(model, policy, stats) as run:
            tokens = model.generate(**batch, **settings)
        print(f"{policy}: {run.counters.fetched:.1f} experts fetched per layer per step")
        print("  " + tokenizer.decode(tokens[0], skip_special_tokens=True).replace("\n", " "))


if __name__ == "__main__":
    main()
