"""Measure the bytes of exact updates of weights under ZeRO-1: pretraining, then fine-tuning on other text.

Two ranks (or ``--ranks``) train the GPT of ``adam.py`` in bf16 with fp32 masters, at 2e-3 with warm-up and
cosine, on the text. Then they fine-tune it on the Python sources of the standard library, at constant
learning rates: with DeepSpeed's own gathers, with exact updates, and with exact updates and compressed
gradients. Bytes are those of the weights of a rank, headers, announcements and whole gathers included; *all*
is everything that rank 0 sends. Losses with dense gradients are compared bit by bit with those of the first
setting. More than two ranks add gradients up in another order than DeepSpeed: there the second one comes
first. ``--backend deferred`` takes the tests' kernels, which leave lengths on their device: bytes are those
of a GPU.

    python benchmarks/studies/exact_updates.py --text wikitext2_valid.txt.gz
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from adam import SEQUENCE, SYMBOLS, held_out_loss, initialize, model_of, text_of
from torch import Tensor
from torch.nn import functional

from dct_plugin.data_parallel import exact_updates
from dct_plugin.kernels import register_backend

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.deferred_backend import DeferredBackend

EXACT = {"sparsity": 0, "value_dtype": "fp32", "parameters": "exact"}
SETTINGS: dict[str, dict[str, Any] | None] = {
    "gathers": None,
    "gathers, gradients by the plugin": {"sparsity": 0, "value_dtype": "fp32", "parameters": None},
    "exact": EXACT,
    "exact, gradients in int8": {"sparsity": 0, "value_dtype": "int8", "parameters": "exact"},
    "exact, gradients in int4": {"sparsity": 0, "value_dtype": "int4", "parameters": "exact"},
    "exact, gradients 0.9": {"sparsity": 0.9, "parameters": "exact"},
    "exact, gradients 0.99": {"sparsity": 0.99, "parameters": "exact"},
}


def sources() -> str:
    """The other text: the modules of the standard library, in order of their names."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)


def train(
    weights: dict[str, Tensor],
    section: dict[str, Any] | None,
    lr: float,
    text: tuple[Tensor, Tensor],
    steps: int,
    *,
    cosine: bool = False,
    backend: str = "auto",
) -> dict[str, Any]:
    """Train from some weights; losses, bytes and weights of this rank."""
    import torch.distributed as dist

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    if section is not None:
        config["dct"] = {
            "data_parallel": {**section, "total_steps": steps},
            "kernels": {"backend": backend},
        }
    model = model_of(0)
    model.load_state_dict(weights)
    engine, rank = initialize(model, config), dist.get_rank()
    generator, offsets = torch.Generator().manual_seed(1), torch.arange(SEQUENCE)
    losses, sent = list[float](), list[tuple[int, int, int, int]]()
    seen, held = text[0], text[1][:50_000]
    before = held_out_loss(engine, held)
    for step in range(steps):
        rate = lr * min(1.0, (step + 1) / 60)
        rate *= max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps))) if cosine else 1.0
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        count = (dist.get_world_size(), 8)
        starts = torch.randint(len(seen) - SEQUENCE - 1, count, generator=generator)[rank]
        where = starts[:, None] + offsets
        loss = functional.cross_entropy(
            engine(seen[where]).float().view(-1, SYMBOLS), seen[where + 1].view(-1)
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if section is not None:
            total = engine.dct.metrics.summary()
            gathers = [total.classes[c] for c in ("parameter_exact", "parameter_full") if c in total.classes]
            crossed = sum(each.sent_bytes for each in gathers), sum(each.dense_bytes for each in gathers)
            if gathers:
                sent.append((*crossed, total.sent_bytes, total.dense_bytes))
    result = {"losses": losses, "sent": sent, "before": before, "after": held_out_loss(engine, held)}
    result["weights"] = {name: tensor.clone().float() for name, tensor in engine.module.state_dict().items()}
    engine.destroy()
    return result


def figures(name: str, result: dict[str, Any], same: bool | None) -> str:
    """Return the row of a run."""
    loss = f"{result['before']:.4f} | {result['after']:.4f}"
    if not result["sent"]:
        return f"| {name} | {loss} | | | | | |"
    steps = [
        [b - a for a, b in zip(first, second, strict=True)]
        for first, second in zip([(0, 0, 0, 0), *result["sent"]], result["sent"], strict=False)
    ]
    last = [sum(column) for column in zip(*steps[-len(steps) // 4 :], strict=True)]
    whole = result["sent"][-1]
    worst = max(step[0] / step[1] for step in steps)
    equal = "" if same is None else "bitwise" if same else "differ"
    cells = f"{whole[1] / whole[0]:.1f}x | {last[1] / last[0]:.1f}x | {worst:.3f} | {last[3] / last[2]:.1f}x"
    return f"| {name} | {loss} | {cells} | {equal} |"


def worker(args: argparse.Namespace) -> None:
    """One rank."""
    import deepspeed
    import torch.distributed as dist

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    register_backend("deferred", DeferredBackend)
    exact_updates.clock = lambda: 0.0  # as on a link where exact updates are the faster way
    (first, first_held), other = text_of(args.text), text_of(args.text, sources())
    start = {name: tensor.clone() for name, tensor in model_of(0).state_dict().items()}
    pretraining = {"cosine": True, "backend": args.backend}
    trained = train(start, EXACT, 2e-3, (first, first_held), args.pretraining, **pretraining)
    rows = [figures("pretraining, 2e-3, exact", trained, None)]
    for lr in args.lr:
        dense: list[float] = []
        for setting in args.settings:
            section = SETTINGS[setting]
            result = train(trained["weights"], section, lr, other, args.steps, backend=args.backend)
            dense = dense or result["losses"]
            same = None if setting == args.settings[0] else result["losses"] == dense
            rows.append(figures(f"{lr:g}, {setting}", result, same))
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
    if dist.get_rank() == 0:
        print(
            "| run | loss before | after | weights | last quarter | worst step, of dense | all, last quarter "
            "| losses |\n|---|--:|--:|--:|--:|--:|--:|---|"
        )
        print("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="plain or gzip")
    parser.add_argument("--pretraining", type=int, default=1200, help="steps")
    parser.add_argument("--steps", type=int, default=400, help="of fine-tuning")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-6])
    parser.add_argument("--backend", default="auto", help="kernels; deferred: those of the tests")
    args = parser.parse_args()
    if "RANK" in os.environ:
        worker(args)
        return
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={args.ranks}",
    ]
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([*launcher, *sys.argv], env=environment, check=True)


if __name__ == "__main__":
    main()
