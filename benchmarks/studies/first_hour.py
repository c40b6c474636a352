"""Measure the loss of a user's first hour: README's block for torch DDP as pasted, on ``adam.py``'s text.

The block is read from README.md and executed. Beside it stand settings that a user may choose instead; those
that are known to lose log a warning. Adam (or ``--optimizer Lion``), 300 steps, no weight decay, no clipping.

    python benchmarks/studies/first_hour.py --text wikitext2_valid.txt.gz
    python benchmarks/studies/first_hour.py --text wikitext2_valid.txt.gz --ranks 4
    python benchmarks/studies/first_hour.py --text wikitext2_valid.txt.gz --optimizer Lion --lr 1e-4 \
        --steps 1200 --settings dense default
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import adam
import powersgd

README = Path(__file__).resolve().parents[2] / "README.md"


def _section(sparsity: float, **options: Any) -> dict[str, Any]:
    return {"section": {"data_parallel": {"sparsity": sparsity, **options}}}


SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "README": {"block": "steps not known"},
    # What follows from the optimizer and the number of ranks, whatever the link.
    "default": {"section": {"data_parallel": {"quality": None}}},
    "README, total_steps": {"block": "steps known"},
    "0.9": _section(0.9),
    **{
        f"start {dense} + {ramp}": _section(0.99, warmup_steps=dense, sparsity_warmup_steps=ramp)
        for dense, ramp in ((30, 90), (45, 135), (60, 120))
    },
    "local 0.99": _section(0.99, feedback="local"),
    "local 0.9": _section(0.9, feedback="local"),
    "step-ahead 0.99, no start": _section(0.99, feedback="step_ahead"),
    "optimizer not told": {**_section(0.99), "told": False},
}


def block(total_steps: int | None) -> str:
    """README's lines for torch DDP."""
    found = re.search(r"\*\*torch DDP\*\*.*?\n\n```python\n(.*?)```", README.read_text(), re.S)
    assert found is not None
    steps = "" if total_steps is None else f", total_steps={total_steps}"
    return found[1].replace("optimizer)", f"optimizer{steps})")


class Engine(powersgd.Engine):
    """A model under DDP with the parts of DeepSpeed's engine that the study uses."""

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        import torch
        from unknown_optimizers import Lion

        import dct_plugin

        make = Lion if config["optimizer"] == "Lion" else getattr(torch.optim, config["optimizer"])
        optimizer = self.optimizer = make(model.parameters(), lr=config["lr"])
        self.module = model
        self._ddp = model = torch.nn.parallel.DistributedDataParallel(model)
        if "block" in config:
            steps = config["steps"] if config["block"] == "steps known" else None
            exec(block(steps), {"model": model, "optimizer": optimizer})
        elif not config.get("told", True):
            dct_plugin.DCTState(config["section"]).register(model)
        elif "section" in config:
            dct_plugin.attach(model, optimizer, config["section"], total_steps=config["steps"])

    def step(self) -> None:
        """Step, and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def configure(args: argparse.Namespace, setting: str) -> dict[str, Any]:
    """Return the options that a rank trains one setting with."""
    return {"optimizer": args.optimizer, "lr": args.lr, "steps": args.steps, **SETTINGS[setting]}


def main() -> None:
    parser = adam.parser_of(__doc__, SETTINGS, list(SETTINGS))
    parser.set_defaults(steps=300, optimizer="Adam", optimizer_params="{}")
    adam.run(parser.parse_args(), configure, Engine)


if __name__ == "__main__":
    main()
