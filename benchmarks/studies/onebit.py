"""1-bit Adam with its momentum thresholded, beside DeepSpeed's own signs: the text model of ``adam.py``.

Needs a DeepSpeed up to 0.19.6 (``make test-onebit`` installs one). All settings train with DeepSpeed's 1-bit
Adam, whose variance is frozen after a fifth of the steps, but for "section", which is AdamW with thresholded
gradients and step-ahead. DeepSpeed packs signs with an operator that no CPU has, and gathers scales of no
dimension into tensors of one, which gloo refuses: here numpy packs and the scales get a dimension, the rest
of its backend is its own code. Held-out loss in nats per character, paired by seed; bytes are what the
loopback interface carried in the second half of the run, all headers included.

    python benchmarks/studies/onebit.py --text wikitext2_valid.txt.gz
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import adam

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "onebit"

#: Name of the backend and settings of the plugin; None leaves the optimizer dense.
SETTINGS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "dense": None,
    "signs": ("compressed", {}),
    "dct-0.9": ("dct", {"sparsity": 0.9}),
    "dct-0.97": ("dct", {"sparsity": 0.97}),
    "dct-0.99": ("dct", {"sparsity": 0.99}),
    "dct-0.97-int8": ("dct", {"sparsity": 0.97, "value_dtype": "int8"}),
    "dct-0.9-int4": ("dct", {"sparsity": 0.9, "value_dtype": "int4"}),
    "section-0.99": ("section", {"sparsity": 0.99, "feedback": "step_ahead"}),
}


class Packer:
    """DeepSpeed's operator: a bit for every entry that is not negative."""

    @staticmethod
    def packbits(values: Any, numel: int, rank: int) -> Any:
        import numpy
        import torch

        return torch.from_numpy(numpy.packbits((values >= 0).numpy()))

    @staticmethod
    def unpackbits(packed: Any, numel: int, rank: int) -> Any:
        import numpy
        import torch

        return torch.from_numpy(numpy.unpackbits(packed.numpy())).float().mul_(2.0).sub_(1.0)

    def load(self) -> Packer:
        return self


class Gloo:
    """``deepspeed.comm`` for its backend."""

    def __getattr__(self, name: str) -> Any:
        import deepspeed.comm

        return getattr(deepspeed.comm, name)

    def all_gather(self, received: list[Any], sent: Any, group: Any) -> None:
        import deepspeed.comm

        deepspeed.comm.all_gather(received, sent.reshape(received[0].shape), group=group)


def configure(args: argparse.Namespace, setting: str) -> dict[str, Any]:
    """DeepSpeed's JSON."""
    import deepspeed.ops.op_builder

    deepspeed.ops.op_builder.PackbitsBuilder = Packer
    import deepspeed.runtime.comm.compressed

    deepspeed.runtime.comm.compressed.dist = Gloo()
    config = adam.config_of(args, "dense")
    chosen, freeze = SETTINGS[setting], args.steps // 5
    parameters = {"lr": args.lr, "weight_decay": 0.01}
    if chosen is None:
        parameters["freeze_step"] = args.steps + 1
        return config | {
            "optimizer": {"type": "OneBitAdam", "params": {**parameters, "comm_backend_name": "dct"}}
        }
    backend, section = chosen
    if backend == "section":
        section = {**section, "warmup_steps": freeze, "sparsity_warmup_steps": args.steps // 10}
        return config | {"dct": {"data_parallel": section}}
    config["optimizer"] = {
        "type": "OneBitAdam",
        "params": {**parameters, "freeze_step": freeze, "comm_backend_name": backend},
    }
    return config | ({"dct": {"data_parallel": section}} if backend == "dct" else {})


def main() -> None:
    parser = adam.parser_of(
        __doc__, SETTINGS, ["dense", "signs", "dct-0.9", "dct-0.97", "dct-0.99", "section-0.99"]
    )
    parser.add_argument("--deepspeed", type=Path, default=FOLDER, help="folder with the older DeepSpeed")
    args = parser.parse_args()
    if not args.worker and not (args.deepspeed / "deepspeed").is_dir():
        sys.exit(f"no DeepSpeed in {args.deepspeed}: make test-onebit")
    folder = str(args.deepspeed.resolve())
    adam.run(args, configure, PYTHONPATH=folder, TORCH_EXTENSIONS_DIR=f"{folder}/torch_extensions")


if __name__ == "__main__":
    main()
