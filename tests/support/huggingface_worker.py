"""Runs the examples for Hugging Face one after the other, in one process per rank.

``plan.json`` holds a list of ``{"id", "example", "arguments"}``; every rank writes ``results/<rank>.json``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch.distributed as dist
from deepspeed_worker import Recorder, digest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def main(plan: str, folder: str) -> None:
    import logging

    results = {}
    for run in json.loads(Path(plan).read_text()):
        recorder = Recorder()
        logging.getLogger("dct_plugin").addHandler(recorder)
        model, losses = importlib.import_module(run["example"]).main(run["arguments"])
        logging.getLogger("dct_plugin").removeHandler(recorder)
        results[run["id"]] = {
            "hash": digest(model),
            "losses": [float(x) for x in losses],
            "log": recorder.lines,
        }
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
