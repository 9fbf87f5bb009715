from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moebudget.core import stats as stats_module
from moebudget.core.stats import ModelFacts, Stats, StatsError, describe, hash_routers, load_stats, require_stats
from moebudget.core.types import MissingStatisticError

FACTS = ModelFacts("qwen3_moe", (1, 2, 5), 8, 2, 4, "0123456789ab")
NEW = r"moebudget calibrate MODEL --data TEXT -o stats\.safetensors"
MAKE = r"moebudget calibrate MODEL --data TEXT --for POLICY -o stats\.safetensors"


def make_stats(**changes: Any) -> Stats:
    g = torch.Generator().manual_seed(0)
    tensors = {
        "predictor_weight": torch.randn(3, 8, 4, generator=g).bfloat16(),
        "predictor_bias": torch.randn(3, 8, generator=g),
        "energy_mean": torch.rand(3, 8, generator=g, dtype=torch.float64),
        "r2_heldout": torch.full((3, 8), math.nan),
        "count": torch.arange(24).reshape(3, 8),
    }
    info = {"model": "org/model", "tokens": 123, "alphas": [0.1, 1.0], "nested": {"kept": None}}
    return dataclasses.replace(Stats(FACTS, tensors, info), **changes)


def saved(tmp_path: Path, stats: Stats | None = None) -> Path:
    path = tmp_path / "stats.safetensors"
    (make_stats() if stats is None else stats).save(path)
    return path


def metadata(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return dict(json.loads(raw[8 : 8 + size])["__metadata__"])


def rewrite(path: Path, tensors: dict[str, Tensor] | None = None, **changes: str | None) -> None:
    """The same file with other metadata (None leaves an entry out) or other tensors."""
    meta = {key: value for key, value in (metadata(path) | changes).items() if value is not None}
    save_file(load_file(path) if tensors is None else tensors, path, metadata=meta)


def test_loaded_statistics_equal_the_saved(tmp_path: Path) -> None:
    stats = make_stats()
    found = load_stats(str(saved(tmp_path, stats)))
    assert found.facts == stats.facts
    assert found.info == stats.info
    assert set(found.tensors) == set(stats.tensors)
    for name, tensor in stats.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
        assert found.tensors[name].dtype == tensor.dtype, name


def test_views_and_parameters_are_saved(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 3).T)
    found = load_stats(saved(tmp_path, make_stats(tensors={"a": weight, "b": weight})))
    assert torch.equal(found.tensors["a"], weight)
    assert torch.equal(found.tensors["b"], weight)
    assert not found.tensors["a"].requires_grad


def test_layers_hold_their_own_tensors() -> None:
    stats = make_stats()
    for position in range(3):
        layer = stats.layer(position)
        assert set(layer) == set(stats.tensors)
        assert torch.equal(layer["predictor_bias"], stats.tensors["predictor_bias"][position])


def test_unfinished_writes_leave_statistics_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    before = path.read_bytes()

    def fails(_tensors: Any, partial: Path, **_: Any) -> None:
        Path(partial).write_bytes(before[:100])
        raise OSError("no space left")

    monkeypatch.setattr(stats_module, "save_file", fails)
    with pytest.raises(OSError, match="no space left"):
        make_stats().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "the unfinished file stays behind"


OTHERS = {
    "family": "mixtral",
    "layers": (1, 2, 4),
    "experts": 16,
    "top_k": 4,
    "hidden": 8,
    "router_hash": "ba9876543210",
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelFacts)])
def test_statistics_of_another_model_are_refused(field: str, tmp_path: Path) -> None:
    stats, model = load_stats(saved(tmp_path)), dataclasses.replace(FACTS, **{field: OTHERS[field]})
    stats.check(FACTS)
    with pytest.raises(StatsError) as caught:
        stats.check(model)
    said = str(caught.value)
    word = {"top_k": "routes per token", "router_hash": "router weights"}.get(field, field)
    assert f"{word} is {getattr(FACTS, field)!r} in the statistics (org/model)" in said
    assert f"{OTHERS[field]!r} in the model" in said
    assert "moebudget calibrate" in said


def test_weights_not_loaded_yet_excuse_the_hash_alone() -> None:
    unloaded = dataclasses.replace(FACTS, router_hash="")
    make_stats().check(unloaded)
    with pytest.raises(StatsError, match=r"experts is 8 .* and 16 in the model"):
        make_stats().check(dataclasses.replace(unloaded, experts=16))


def test_policies_that_need_statistics_do_not_start_without() -> None:
    require_stats("native", frozenset(), None)
    require_stats("static:budget=4", {"energy_mean"}, make_stats())
    with pytest.raises(MissingStatisticError, match=rf"'base:budget=4' needs a, b and no .*{MAKE}"):
        require_stats("base:budget=4", {"b", "a"}, None)


def test_descriptions_hold_all_records_as_json() -> None:
    said = json.loads(json.dumps(describe(make_stats())))
    assert said.items() >= make_stats().info.items()
    assert said["facts"]["config_hash"] == FACTS.config_hash
    assert said["facts"]["layers"] == [1, 2, 5]
    assert said["tensors"]["predictor_weight"] == [3, 8, 4]


def test_missing_statistics_are_named_before_the_run() -> None:
    stats = make_stats()
    stats.check(FACTS, {"energy_mean", "predictor_bias"})
    with pytest.raises(MissingStatisticError, match=f"'affinity'.*hold: count, energy_mean.*{MAKE}"):
        stats.check(FACTS, {"energy_mean", "affinity"})


def test_missing_files_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"no statistics at .*{NEW}"):
            load_stats(path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_empty_and_truncated_files_are_refused(keep: int, tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    size = path.stat().st_size
    with pytest.raises(StatsError, match=rf"stats\.safetensors \({size} bytes\) is empty, truncated or not .*{NEW}"):
        load_stats(path)


def test_files_of_another_program_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for meta in (None, {"format": "pt"}):
        save_file({"w": torch.ones(3, 8)}, path, metadata=meta)
        with pytest.raises(StatsError, match=f"but not statistics of moebudget.*{NEW}"):
            load_stats(path)
    path.write_text("{}")
    with pytest.raises(StatsError, match="not a safetensors file"):
        load_stats(path)


@pytest.mark.parametrize("schema", ["0", "2", "1.0"])
def test_other_schemas_are_refused(schema: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    rewrite(path, moebudget_schema=schema)
    with pytest.raises(StatsError, match=f"has schema {schema}, this version of moebudget reads schema 1; .*{NEW}"):
        load_stats(path)


DAMAGED = {
    "no facts": {"facts": None},
    "no info": {"info": None},
    "facts cut off": {"facts": '{"family": "qw'},
    "info cut off": {"info": "{"},
    "facts empty": {"facts": "{}"},
    "facts of another type": {"facts": "[1, 2]"},
    "facts null": {"facts": "null"},
    "a fact missing": {"facts": '{"family": "qwen3_moe", "layers": [1, 2, 5], "experts": 8}'},
    "a fact too many": {"facts": json.dumps(dataclasses.asdict(FACTS) | {"colour": "red"})},
    "layers no list": {"facts": json.dumps(dataclasses.asdict(FACTS) | {"layers": 3})},
}


@pytest.mark.parametrize("changes", DAMAGED.values(), ids=DAMAGED)
def test_damaged_metadata_is_refused(changes: dict[str, str | None], tmp_path: Path) -> None:
    path = saved(tmp_path)
    rewrite(path, **changes)
    with pytest.raises(StatsError, match=rf"stats\.safetensors has damaged metadata.*{NEW}"):
        load_stats(path)


@pytest.mark.parametrize("shape", [(3,), (2, 8), (3, 7, 4), (8, 3), ()])
def test_tensors_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = saved(tmp_path)
    rewrite(path, {"energy_mean": torch.ones(3, 8), "other": torch.ones(shape)})
    with pytest.raises(StatsError) as caught:
        load_stats(path)
    assert f"other has shape {shape}, expected to start with 3 x 8 for 3 layers of 8 experts" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "good", "bad"), [("route_ratio", (3, 2), (3, 8)), ("nonlinear_features", (3, 5, 4), (2, 5, 4))]
)
def test_tensors_that_are_not_per_expert_have_their_shape(
    name: str, good: tuple[int, ...], bad: tuple[int, ...], tmp_path: Path
) -> None:
    path = saved(tmp_path)
    rewrite(path, {name: torch.ones(good)})
    assert load_stats(path).tensors[name].shape == good
    rewrite(path, {name: torch.ones(bad)})
    with pytest.raises(StatsError, match=f"{name} has shape"):
        load_stats(path)


def test_checkpoints_in_bfloat16_and_float32_hash_alike() -> None:
    g = torch.Generator().manual_seed(0)
    routers = [torch.randn(8, 4, generator=g) for _ in range(2)]
    found = hash_routers(routers)
    assert len(found) == 12
    assert int(found, 16) >= 0
    assert hash_routers(router.bfloat16() for router in routers) == found
    assert hash_routers(router.bfloat16().float() for router in routers) == found
    assert hash_routers(torch.nn.Parameter(router.T.contiguous().T) for router in routers) == found


def test_fine_tunes_hash_apart() -> None:
    router = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    other = router.clone()
    other[7, 3] *= 1.01
    assert hash_routers([router, router]) != hash_routers([router, other])
    assert hash_routers([router, other]) != hash_routers([other, router])


def test_config_hash_covers_every_field_but_weights() -> None:
    hashes = {dataclasses.replace(FACTS, **{field: value}).config_hash for field, value in OTHERS.items()}
    assert len(hashes | {FACTS.config_hash}) == len(OTHERS)
    assert dataclasses.replace(FACTS, router_hash="x").config_hash == FACTS.config_hash
