"""Native routing in one launch: the baseline for the time of a fused policy."""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.rows import load_logits, mass_of, ordered, row_scores, top_slots


@triton.jit
def native_rows(
    logits, bias, ids, weights, logits_stride, N,
    NP: tl.constexpr, K: tl.constexpr, ROUTER: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program t: native ids [t, K] and weights [t, K] float32."""
    row = tl.program_id(0)
    x = load_logits(logits + row * logits_stride, N, NP)
    probs, choice, _, _ = row_scores(x, bias, N, NP, ROUTER, HAS_BIAS)
    place = top_slots(ordered(choice), choice > -float("inf"), NP, K)
    scale = ROUTER.SCALE
    if ROUTER.RENORMALIZE:
        scale = scale / mass_of(probs, place < K)
    expert = tl.arange(0, NP)
    tl.store(ids + row * K + place, expert.to(tl.int64), mask=place < K)
    tl.store(weights + row * K + place, probs * scale, mask=place < K)
