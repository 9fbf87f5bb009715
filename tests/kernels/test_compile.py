"""Compilation of every kernel for a Hopper GPU, which the machine need not have."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

# For a separate process, because Triton chooses between interpreter and compiler on import.
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moebudget.kernels import native, route, score
from moebudget.kernels.settings import Filling, RouterForm, Selection

POINTERS = {
    "logits": "*bf16", "hidden": "*bf16", "bias": "*fp32", "kinds_in": "*i8", "budget": "*i32", "price": "*fp64",
    "scale_in": "*fp64", "scale_out": "*fp64", "home": "*i32", "slope": "*fp32", "offset": "*fp32", "energy": "*fp32",
    "score": "*fp32", "places": "*i8", "bits": "*i32", "kinds": "*i8", "partial": "*fp64", "arrivals": "*i32",
    "runs": "*fp32", "native_ids": "*i32", "native_weights": "*fp32",
    "ids": "*i32", "weights": "*fp32", "counters": "*fp64",
}
settings = json.loads(sys.argv[1])
for name, group in (("ROUTER", RouterForm), ("SELECT", Selection), ("FILL", Filling)):
    settings[name] = group(*(settings.pop(field) for field in group._fields))
for kernel in (score.score_rows, route.route_rows, native.native_rows):
    known = {k: v for k, v in settings.items() if k in kernel.arg_names}
    signature = {a: "constexpr" if a in known else POINTERS.get(a, "i32") for a in kernel.arg_names}
    constants = {(kernel.arg_names.index(k),): v for k, v in known.items()}
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants, {}), target=target, options={"num_warps": 1})
    assert compiled.asm["cubin"]
print("compiled")
"""
SETTINGS = {
    "NP": 64, "K": 4, "ROWS": 16, "CHUNK": 0, "D": 512, "SPLIT": 4, "BLOCK": 512, "SIGMOID": False, "HAS_BIAS": False,
    "RENORMALIZE": True, "SCALE": 1.0, "GROUPS": 1, "OPEN": 1, "TOP2": False, "GP": 2, "RULE": 0, "K0": 1,
    "CAPS": True, "PRICED": False, "HOLD": 0.0, "ADDITIVE": True, "RANKS": 1, "LEVEL": False,
    "DROP": False, "DENOMINATOR": 0, "ROUTED": True, "COUNT": True, "PDL": True,
}  # fmt: skip
GROUPED = {"SIGMOID": True, "HAS_BIAS": True, "GROUPS": 4, "OPEN": 2, "TOP2": True, "GP": 4, "SCALE": 2.5}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**GROUPED, "CHUNK": 32, "ROUTED": False, "DROP": True},
        {"RULE": 1, "SPLIT": 1, "DENOMINATOR": 2, "PDL": False},
        {"PRICED": True, "DENOMINATOR": 2, "HOLD": 0.01},
        {"RANKS": 4},
        {"LEVEL": True, "RANKS": 8, "PRICED": True, "HOLD": 0.01},
        {"RULE": 4, "SPLIT": 1, "CAPS": False, "RENORMALIZE": False},
        {"RULE": 5, "SPLIT": 1, "ADDITIVE": False, "CAPS": False},
    ],
    ids=lambda changes: "-".join(itertools.islice(changes, 2)) or "base",
)
def test_kernels_compile_for_a_hopper_gpu(changes: dict[str, object]) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, json.dumps({**SETTINGS, **changes})]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout == "compiled\n"
