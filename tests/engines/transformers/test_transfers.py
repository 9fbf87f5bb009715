"""Times of copies and their fit: the line, bad measurements, and a device without a link."""

from __future__ import annotations

import math

import pytest
import torch

from moebudget.engines.transformers.transfers import TransferFit, fit_transfer, measure_transfers

SIZES = [2**i for i in range(10, 26)]


def test_the_fit_recovers_the_link_that_made_the_times() -> None:
    link = TransferFit(12e-6, 25e9)
    exact = fit_transfer(SIZES, [link.seconds(size) for size in SIZES])
    assert exact.t0 == pytest.approx(link.t0, rel=1e-6)
    assert exact.bandwidth == pytest.approx(link.bandwidth, rel=1e-9)
    g = torch.Generator().manual_seed(0)
    noise = (torch.rand(len(SIZES), generator=g) - 0.5).mul(2e-6).tolist()
    noisy = fit_transfer(SIZES, [link.seconds(size) + x for size, x in zip(SIZES, noise, strict=True)])
    assert noisy.t0 == pytest.approx(link.t0, abs=1e-6)
    assert noisy.bandwidth == pytest.approx(link.bandwidth, rel=0.01)
    assert fit_transfer([1, 3], [1.0, 2.0]) == TransferFit(0.5, 2.0)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], "at least two different sizes, got 0 sizes and 0 times"),
        ([8], [1.0], "at least two different sizes"),
        ([8, 8], [1.0, 1.1], "at least two different sizes"),
        ([8, 16], [1.0], "got 2 sizes and 1 times"),
        ([8, 16], [2.0, 1.0], "do not grow with size"),
        ([8, 16], [1.0, 1.0], "do not grow with size"),
        ([8, 16], [1.0, math.nan], "do not grow with size"),
        ([8, 16], [1.0, math.inf], "do not grow with size"),
    ],
)
def test_measurements_without_a_line_are_refused(sizes: list[int], seconds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_transfer(sizes, seconds)


def test_measuring_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="measures copies from host to GPU; cpu is not a CUDA device"):
        measure_transfers("cpu", [1024])
