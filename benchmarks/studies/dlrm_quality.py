"""Quality of a DLRM against the bytes of its embedding exchange, layer by layer of the channel.

Writes one configuration for each layer and strength, and for smaller dense embeddings, and gives them to
`dct dlrm --compare`, which trains them all under every seed with DeepSpeed on local ranks and pairs the
differences by seed. The report (JSON) and the plot (PNG) go to --out.

    python benchmarks/studies/dlrm_quality.py --out out  # Diabetes, which ships with this
    python benchmarks/studies/dlrm_quality.py --out out --data train.txt --format criteo
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OFF: dict[str, Any] = {"enabled": False}
PLAIN: dict[str, Any] = {"enabled": False, "deduplicate": False}


def settings() -> dict[str, dict[str, Any]]:
    """Name of a run -> its ``dct`` section and the width of its tables."""

    def embedding(dim: int = 16, **options: Any) -> dict[str, Any]:
        return {"dim": dim, "dct": {"embedding": options, "data_parallel": OFF}}

    def data_parallel(sparsity: float, options: dict[str, Any] = PLAIN, **feedback: Any) -> dict[str, Any]:
        section = {"sparsity": sparsity, "feedback": "local", **feedback}
        return {"dim": 16, "dct": {"embedding": options, "data_parallel": section}}

    ahead = {"feedback": "step_ahead"}
    # An epoch of Criteo's sample is 125 steps: the start is as short as that asks for.
    start = {"warmup_steps": 10, "sparsity_warmup_steps": 20}
    longer = {"warmup_steps": 20, "sparsity_warmup_steps": 40}
    best = {"error_bound": 0.03, "gradient_bound": 0.1}
    fine = {"error_bound": 0.01, "gradient_bound": 0.1}
    return {
        "lossless": embedding(),
        "bound 0.01": embedding(**fine),
        "bound 0.03": embedding(**best),
        "bound 0.1": embedding(error_bound=0.1, gradient_bound=0.1),
        "bound 0.03, gradient 0.3": embedding(error_bound=0.03, gradient_bound=0.3),
        "threshold 0.5": embedding(sparsity=0.5),
        "threshold 0.75": embedding(sparsity=0.75),
        "threshold 0.9": embedding(sparsity=0.9),
        "threshold 0.95": embedding(sparsity=0.95),
        "threshold 0.9, dense gradient": embedding(sparsity=0.9, dense_gradient=True),
        "threshold 0.5, bound 0.03": embedding(sparsity=0.5, **best),
        # What narrower tables do at the same bytes, the honest alternative.
        **{f"width {dim}, lossless": embedding(dim) for dim in (8, 4, 2, 1)},
        "width 4, bound 0.03": embedding(4, **best),
        "DCT-DP 0.9": data_parallel(0.9),
        "DCT-DP 0.99": data_parallel(0.99),
        "DCT-DP 0.9, step-ahead": data_parallel(0.9, **ahead),
        "DCT-DP 0.99, step-ahead": data_parallel(0.99, **ahead),
        "DCT-DP 0.99, 10 + 20 steps": data_parallel(0.99, **start),
        "DCT-DP 0.99, step-ahead, 10 + 20 steps": data_parallel(0.99, **ahead, **start),
        **{
            f"DCT-DP 0.99, step-ahead, 10 + 20 steps, {kind}": data_parallel(
                0.99, **ahead, **start, value_dtype=kind
            )
            for kind in ("int8", "int4", "int2")
        },
        **{
            f"Accordion, {every} steps": data_parallel(
                0.99, adaptive={"kind": "accordion", "sparsity": 0.9, "interval": every}
            )
            for every in (10, 25, 50)
        },
        "Accordion, 25 steps, step-ahead, 10 + 20 steps": data_parallel(
            0.99, adaptive={"kind": "accordion", "sparsity": 0.9, "interval": 25}, **ahead, **start
        ),
        "hybrid": data_parallel(0.9, best),
        "hybrid 0.99, step-ahead, 10 + 20 steps": data_parallel(0.99, best, **ahead, **start),
        "hybrid 0.99, step-ahead, 20 + 40 steps": data_parallel(0.99, best, **ahead, **longer),
        # As configs/hybrid_dct.json; two-phase is what more than four ranks take.
        "fine hybrid 0.99": data_parallel(0.99, fine, **ahead, **start),
        "fine hybrid 0.99, two-phase": data_parallel(0.99, fine, exchange="two_phase", **ahead, **start),
    }


def configuration(setting: dict[str, Any], *, lr: float) -> dict[str, Any]:
    """DeepSpeed JSON of a run."""
    return {
        "train_batch_size": 256,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "dlrm": {
            "model": "dlrm",
            "embedding_dim": setting["dim"],
            "bottom": [128, 64],
            "top": [256, 128],
            "exchange": "all_to_all",
        },
        "dct": setting["dct"],
    }


def main() -> int:
    """Train everything; the exit status is that of `dct dlrm`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for report and plot")
    parser.add_argument("--data", help="as of `dct dlrm`; Diabetes without it")
    parser.add_argument("--format", default="diabetes", choices=["criteo", "diabetes"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3, help="Adam's learning rate (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(settings()), help="some of the settings")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in arguments.only or settings():
            file = Path(folder) / f"{name}.json"
            file.write_text(json.dumps(configuration(settings()[name], lr=arguments.lr), indent=2) + "\n")
            files.append(str(file))
        command = [sys.executable, "-m", "dct_plugin.cli", "dlrm", "--compare", *files]
        command += ["--format", arguments.format, *(["--data", arguments.data] if arguments.data else [])]
        for option in ("ranks", "epochs", "seeds"):
            command += [f"--{option}", str(getattr(arguments, option))]
        command += ["--report", str(arguments.out / f"{arguments.format}.json")]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
