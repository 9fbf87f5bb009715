"""Trainer of the embedded demo model: a Qwen3-MoE of 8M parameters, 64 experts per layer, 8 per token.

    python -m experiments.build.train_demo --text FOLDER --tokenizer tokenizer.json --work WORK --out MODEL \\
        --seconds 560

FOLDER holds train-*.txt.xz and valid-*.txt.xz, documents separated by a line `<|endoftext|>`. The tasks are generated.
The run stops after --seconds with its state in WORK and continues when called again. The model is written to --out
after --tokens tokens (or with --export-now). Only the times assume an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import multiprocessing
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from moebudget.demo.tasks import END_OF_TEXT, held_out, training_documents

grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int = 8192
    hidden: int = 160
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 64
    top_k: int = 8
    width: int = 32
    eps: float = 1e-6
    theta: float = 10000.0
    length: int = 512
    rows: int = 128  # sequences per step
    task_share: float = 0.3
    task_bytes: int = 240_000_000
    lr: float = 3e-3
    warmup: int = 200
    decay_from: float = 0.5  # share of the steps after which the learning rate falls linearly to 0
    weight_decay: float = 0.1
    balance: float = 0.03  # weight of the per-layer load loss
    skew: float = 9.0  # expected load of the u-th most used expert ~ exp(-u / skew); 0: equal loads
    pooled: int = 0  # 1: one load loss for all layers together, as transformers has it
    seed: int = 0


def init_params(c: Config, device: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(c.seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=g) * std

    out = 1 / math.sqrt(2 * c.layers)
    d, q, kv = c.hidden, c.heads * c.head_dim, c.kv_heads * c.head_dim
    p = {"embed": normal(c.vocab, d, std=0.02), "norm": torch.ones(d)}
    for i in range(c.layers):
        p |= {
            f"{i}.ln1": torch.ones(d),
            f"{i}.ln2": torch.ones(d),
            f"{i}.qn": torch.ones(c.head_dim),
            f"{i}.kn": torch.ones(c.head_dim),
            f"{i}.q": normal(q, d, std=0.6 / math.sqrt(d)),
            f"{i}.k": normal(kv, d, std=0.6 / math.sqrt(d)),
            f"{i}.v": normal(kv, d, std=0.6 / math.sqrt(d)),
            f"{i}.o": normal(d, q, std=0.6 / math.sqrt(q) * out),
            f"{i}.gate": normal(c.experts, d, std=0.02),
            f"{i}.gate_up": normal(c.experts, 2 * c.width, d, std=0.6 / math.sqrt(d)),
            f"{i}.down": normal(c.experts, d, c.width, std=0.6 / math.sqrt(c.width) * out),
        }
    return {name: t.to(device) for name, t in p.items()}


def target_load(c: Config, layer: int) -> list[float]:
    """Shares of the routes that a layer's experts should get, the most used ones at random places.

    Trained models use their experts unequally: at batch 16 Qwen3-30B-A3B fetches 49 of 128 (0.6 of what equal and
    independent loads would give), while a small model with equal loads fetches 0.9. No expert exceeds 3/4 of the rows.
    """
    shape = [math.exp(-u / c.skew) if c.skew else 1.0 for u in range(c.experts)]
    low, high = 0.0, float(c.experts)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(0.75, middle * s) for s in shape) < c.top_k else (low, middle)
    loads = [min(0.75, low * s) / c.top_k for s in shape]
    order = torch.randperm(c.experts, generator=torch.Generator().manual_seed(1000 * c.seed + layer)).tolist()
    return [loads[u] for u in order]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = x.float()
    return weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def experts(h: Tensor, p: dict[str, Tensor], i: int, c: Config) -> tuple[Tensor, Tensor, Tensor]:
    """h [T, d] -> (sum of the weighted experts [T, d], each expert's share of the routes and mean probability [N])."""
    probs = F.linear(h, p[f"{i}.gate"]).softmax(-1, dtype=torch.float32)
    w, ids = probs.topk(c.top_k, -1)
    w = (w / w.sum(-1, keepdim=True)).to(h.dtype)
    order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(order.values, torch.arange(c.experts, device=h.device), right=True).to(torch.int32)
    x = h[order.indices // c.top_k]
    gate, up = grouped_mm(x, p[f"{i}.gate_up"].transpose(1, 2), offs=ends).chunk(2, -1)
    y = grouped_mm(F.silu(gate) * up, p[f"{i}.down"].transpose(1, 2), offs=ends)
    back = torch.empty_like(order.indices)
    back[order.indices] = torch.arange(len(back), device=h.device)
    y = (y[back].view(*ids.shape, -1) * w[..., None]).sum(1)
    share = torch.diff(ends, prepend=ends.new_zeros(1)).float() / ids.numel()
    return y, share, probs.mean(0)


def forward(p: dict[str, Tensor], ids: Tensor, c: Config, unions: list | None = None) -> tuple[Tensor, Tensor]:
    """ids [B, S] -> (logits [B, S, V], load loss); `unions` receives each layer's experts per position, [S].

    The load loss is N sum_u (f_u - load_u) P_u, mean over layers, with f_u the share of the routes that go to expert u
    and P_u its mean probability; equal loads give the usual loss - 1. `pooled` takes f and P over all layers.
    """
    b, s = ids.shape
    freq = c.theta ** (-torch.arange(0, c.head_dim, 2, device=ids.device).float() / c.head_dim)
    angle = torch.arange(s, device=ids.device).float()[:, None] * freq
    cos, sin = (f(torch.cat((angle, angle), -1)).to(p["embed"].dtype) for f in (torch.cos, torch.sin))
    x, used = F.embedding(ids, p["embed"]), []
    for i in range(c.layers):
        h = rms(x, p[f"{i}.ln1"], c.eps)
        q, k, v = (F.linear(h, p[f"{i}.{n}"]).view(b, s, -1, c.head_dim) for n in "qkv")
        q = rotate(rms(q, p[f"{i}.qn"], c.eps).transpose(1, 2), cos, sin)
        k = rotate(rms(k, p[f"{i}.kn"], c.eps).transpose(1, 2), cos, sin)
        a = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + F.linear(a.transpose(1, 2).reshape(b, s, -1), p[f"{i}.o"])
        h = rms(x, p[f"{i}.ln2"], c.eps)
        y, share, probs = experts(h.view(b * s, -1), p, i, c)
        used.append((share - p["loads"][i], probs))
        if unions is not None:
            chosen = F.linear(h, p[f"{i}.gate"]).topk(c.top_k, -1).indices  # [B, S, K]
            unions.append(F.one_hot(chosen, c.experts).amax((0, 2)).sum(-1))
        x = x + y.view_as(x)
    excess, probs = (torch.stack(part) for part in zip(*used, strict=True))  # [L, N] each
    if c.pooled:
        excess, probs = excess.mean(0, keepdim=True), probs.mean(0, keepdim=True)
    return F.linear(rms(x, p["norm"], c.eps), p["embed"]), c.experts * (excess * probs).sum(-1).mean()


def loss_of(p: dict[str, Tensor], rows: Tensor, c: Config) -> tuple[Tensor, Tensor]:
    logits, balance = forward(p, rows[:, :-1], c)
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()), balance


def encode(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    return np.concatenate([np.asarray([*e.ids, end], np.uint16) for e in encoded])


def read_text(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        text = file.read()
    return [doc.strip("\n") for doc in text.split(f"\n{END_OF_TEXT}\n") if doc.strip()]


def task_shard(job: tuple[int, int, str]) -> np.ndarray:
    size, seed, tokenizer = job
    return encode(list(training_documents(size, seed)), Tokenizer.from_file(tokenizer))


def streams(a: argparse.Namespace, c: Config) -> dict[str, np.ndarray]:
    """Token streams `text`, `tasks` and `valid`, made once and kept in the work folder."""
    files = {name: a.work / f"{name}.npy" for name in ("text", "tasks", "valid")}
    if not all(f.exists() for f in files.values()):
        started, shards = time.time(), 16
        jobs = [(c.task_bytes // shards, 1000 + i, str(a.tokenizer)) for i in range(shards)]
        with multiprocessing.get_context("spawn").Pool() as pool:
            tasks = pool.map_async(task_shard, jobs, chunksize=1)
            tokenizer = Tokenizer.from_file(str(a.tokenizer))
            for part, name in (("train", "text"), ("valid", "valid")):
                documents = [d for f in sorted(a.text.glob(f"{part}-*.txt.xz")) for d in read_text(f)]
                np.save(files[name], encode(documents, tokenizer))
            np.save(files["tasks"], np.concatenate(tasks.get()))
        print(f"tokenised in {time.time() - started:.0f} s", flush=True)
    return {name: np.load(f, mmap_mode="r") for name, f in files.items()}


def batch(data: dict[str, np.ndarray], step: int, c: Config, device: str) -> Tensor:
    """The rows of a step depend on the seed and the step alone, so a resumed run sees the same data."""
    rng = np.random.default_rng((c.seed, step))
    n_tasks = round(c.rows * c.task_share)
    rows = []
    for name, n in (("tasks", n_tasks), ("text", c.rows - n_tasks)):
        starts = rng.integers(0, len(data[name]) - c.length - 1, n)
        rows += [data[name][s : s + c.length + 1] for s in starts]
    return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device, non_blocking=True)


@torch.no_grad()
def check(p: dict[str, Tensor], data: dict[str, np.ndarray], a: argparse.Namespace, c: Config) -> dict:
    """Held-out loss, task accuracy (greedy exact match, which teacher forcing decides) and experts per batch of 16."""
    starts = np.linspace(0, len(data["valid"]) - c.length - 1, 64).astype(int)
    rows = np.stack([data["valid"][s : s + c.length + 1] for s in starts]).astype(np.int64)
    loss = loss_of(p, torch.from_numpy(rows).to(a.device), c)[0].item()
    unions: list[Tensor] = []
    for part in rows[np.random.default_rng(0).permutation(64)].reshape(4, 16, -1):
        forward(p, torch.from_numpy(part[:, :-1]).to(a.device), c, unions)
    by_layer = torch.stack(unions).float().mean(-1).view(4, c.layers).mean(0)
    tokenizer, hits = Tokenizer.from_file(str(a.tokenizer)), {}
    items = held_out("test", a.items)
    for n in range(0, len(items), 256):
        chunk = items[n : n + 256]
        prompts = [[0, *tokenizer.encode(i.prompt).ids] for i in chunk]
        targets = [tokenizer.encode(i.target).ids for i in chunk]
        full = [x + y for x, y in zip(prompts, targets, strict=True)]
        ids = torch.zeros(len(full), max(map(len, full)), dtype=torch.long)
        for r, row in enumerate(full):
            ids[r, : len(row)] = torch.tensor(row)
        best = forward(p, ids.to(a.device), c)[0].argmax(-1).cpu()
        for item, x, y, row in zip(chunk, prompts, targets, best, strict=True):
            ok = row[len(x) - 1 : len(x) + len(y) - 1].tolist() == y
            hits.setdefault(item.task, []).append(ok)
    tasks = {t: round(100 * sum(h) / len(h), 1) for t, h in hits.items()}
    union = {"union_at_16": [round(u, 1) for u in by_layer.tolist()]}
    return {
        "valid_loss": round(loss, 4),
        **union,
        "tasks": tasks,
        "task_avg": round(sum(tasks.values()) / len(tasks), 2),
    }


def export(p: dict[str, Tensor], a: argparse.Namespace, c: Config) -> None:
    """Write the checkpoint in the layout that transformers and vLLM read (one tensor per expert)."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {"ln1": "input_layernorm", "ln2": "post_attention_layernorm", "gate": "mlp.gate"}
    names |= {"qn": "self_attn.q_norm", "kn": "self_attn.k_norm"}
    tensors = {"model.embed_tokens.weight": p["embed"], "model.norm.weight": p["norm"]}
    for i in range(c.layers):
        prefix = f"model.layers.{i}"
        tensors |= {f"{prefix}.{name}.weight": p[f"{i}.{short}"] for short, name in names.items()}
        for e in range(c.experts):
            gate, up = p[f"{i}.gate_up"][e].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": p[f"{i}.down"][e]}
            tensors |= {f"{prefix}.mlp.experts.{e}.{name}.weight": t for name, t in parts.items()}
    a.out.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to(torch.bfloat16).cpu().contiguous() for name, t in tensors.items()}
    save_file(tensors, a.out / "model.safetensors", metadata={"format": "pt"})
    config = Qwen3MoeConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.width * c.top_k, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, num_experts=c.experts,
        num_experts_per_tok=c.top_k, moe_intermediate_size=c.width, norm_topk_prob=True, tie_word_embeddings=True,
        max_position_embeddings=2048, rms_norm_eps=c.eps, rope_theta=c.theta, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config = config.to_diff_dict()  # under the names of the public Qwen3-MoE checkpoints, which every release reads
    config |= {"num_experts": c.experts, "rope_theta": c.theta}
    for newer in ("num_local_experts", "rope_parameters", "transformers_version"):
        config.pop(newer, None)
    (a.out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    special |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    (a.out / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")
    shutil.copy(a.tokenizer, a.out / "tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(a.out, dtype=torch.float32)
    ids = torch.arange(40, 72)[None]
    ours = forward({n: t.detach().to(torch.bfloat16).float().cpu() for n, t in p.items()}, ids, c)[0]
    worst = (model(ids).logits - ours).abs().max().item()
    if not worst < 1e-3:
        raise RuntimeError(f"the exported model differs from the trained one: largest logit difference {worst}")
    print(f"exported to {a.out}; largest logit difference to the class of transformers {worst:.1e}", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--text", type=Path, required=True)
    ap.add_argument("--tokenizer", type=Path, required=True)
    ap.add_argument("--work", type=Path, required=True)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--tokens", type=float, default=400e6)
    ap.add_argument("--seconds", type=float, default=560)
    ap.add_argument("--device", default="cuda")
    ap.add_argument(
        "--items",
        type=int,
        default=100,
        help="test items per task in a check, three times as many at the end",
    )
    ap.add_argument("--check-every", type=int, default=1000, help="steps between checks")
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--export-now", action="store_true")
    ap.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of Config to change")
    a = ap.parse_args()
    changes = {k: type(getattr(Config(), k))(v) for k, v in (s.split("=") for s in a.set)}
    c, started = dataclasses.replace(Config(), **changes), time.time()
    a.work.mkdir(parents=True, exist_ok=True)
    data = streams(a, c)
    print({k: len(v) for k, v in data.items()}, dataclasses.asdict(c), flush=True)

    master = {n: t.requires_grad_() for n, t in init_params(c, a.device).items()}
    print(f"{sum(t.numel() for t in master.values()) / 1e6:.2f}M parameters", flush=True)
    half = {n: t.detach().to(torch.bfloat16).requires_grad_() for n, t in master.items()}
    loads = torch.tensor([target_load(c, i) for i in range(c.layers)], device=a.device)
    groups = [
        {"params": [t for t in master.values() if t.dim() > 1], "weight_decay": c.weight_decay},
        {"params": [t for t in master.values() if t.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95), eps=1e-10, fused=a.device == "cuda")
    steps, step, state = int(a.tokens / (c.rows * c.length)), 0, a.work / "state.pt"
    if state.exists():
        saved = torch.load(state, weights_only=True, map_location=a.device)
        if saved["config"] != dataclasses.asdict(c):
            sys.exit(f"{state} belongs to another configuration: {saved['config']}; give another --work")
        step = saved["step"]
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for n, t in master.items():
                t.copy_(saved["params"][n])
                half[n].copy_(t)
    compiled = loss_of if a.no_compile else torch.compile(loss_of, dynamic=False)
    log = (a.work / "log.jsonl").open("a")
    mark, mark_step = time.time(), step
    while step < steps and time.time() - started < a.seconds and not a.export_now:
        falling = min(1.0, (steps - step) / max(1, steps * (1 - c.decay_from)))
        for group in optimizer.param_groups:
            group["lr"] = c.lr * min(1.0, (step + 1) / c.warmup) * falling
        loss, balance = compiled({**half, "loads": loads}, batch(data, step, c, a.device), c)
        (loss + c.balance * balance).backward()
        with torch.no_grad():
            for n, t in master.items():
                t.grad = half[n].grad.float()
                half[n].grad = None
            torch.nn.utils.clip_grad_norm_(list(master.values()), 1.0)
            optimizer.step()
            torch._foreach_copy_(list(half.values()), list(master.values()))
        step += 1
        if step % 100 == 0 or step == 20:
            row = {"step": step, "tokens": step * c.rows * c.length, "loss": round(loss.item(), 4)}
            row |= {"balance": round(balance.item(), 4), "lr": optimizer.param_groups[0]["lr"]}
            row["tokens_per_s"] = round((step - mark_step) * c.rows * c.length / (time.time() - mark))
            if step % a.check_every == 0 or step == steps:
                row |= check({**half, "loads": loads}, data, a, c)
            mark, mark_step = time.time(), step
            print(json.dumps(row), file=log, flush=True)
            print(json.dumps(row), flush=True)
    saved = {"config": dataclasses.asdict(c), "step": step, "params": master, "optimizer": optimizer.state_dict()}
    torch.save(saved, state)
    if step >= steps or a.export_now:
        a.items *= 3
        print(json.dumps({"final": check({**half, "loads": loads}, data, a, c), "step": step}), flush=True)
        export({**half, "loads": loads}, a, c)
    else:
        print(f"stopped at step {step} of {steps}: call again with the same arguments to go on", flush=True)


if __name__ == "__main__":
    main()
