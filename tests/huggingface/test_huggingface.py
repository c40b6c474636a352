"""The examples for Hugging Face's Trainer and Accelerate, with DeepSpeed and with torch's DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import CONFIGS
from support.deepspeed_launch import run_script

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORKER = Path(__file__).parents[1] / "support" / "huggingface_worker.py"


def run(plan: list[dict[str, Any]], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Results by run, per rank; what was printed."""
    (folder / "plan.json").write_text(json.dumps(plan))
    printed = run_script(2, WORKER, folder, str(folder / "plan.json"), str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)], printed


def test_deepspeed_gets_the_section_of_the_json(tmp_path: Path) -> None:
    """Bitwise what the Trainer trains without a section, at sparsity 0; at 0.9 it learns."""
    config = json.loads((CONFIGS / "huggingface_zero1.json").read_text())
    sections = {
        "plain": None,
        "exact": {"data_parallel": {"sparsity": 0, "value_dtype": "fp32"}},
        "sparse": {"data_parallel": {"sparsity": 0.9}},
    }
    ready = str(CONFIGS / "deepspeed_zero1_dct.json")
    # First: the Trainer makes Accelerate's state anew, another Accelerator does not.
    plan = [
        {"id": "accelerate", "example": "hf_accelerate", "arguments": ["--deepspeed", ready, "--steps", "30"]}
    ]
    for name, section in sections.items():
        del config["dct"]
        if section is not None:
            config["dct"] = section
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(config))
        config.setdefault("dct", None)
        plan.append(
            {
                "id": name,
                "example": "hf_trainer",
                "arguments": ["--deepspeed", str(file), "--steps", "18"],
            }
        )
    results, _ = run(plan, tmp_path)
    for rank in results:
        assert rank["exact"]["hash"] == rank["plain"]["hash"] != rank["sparse"]["hash"]
        assert rank["exact"]["losses"] == rank["plain"]["losses"]
        assert rank["sparse"]["losses"][-1] < rank["sparse"]["losses"][0]
        assert rank["accelerate"]["losses"][-1] < 0.5 * rank["accelerate"]["losses"][0]
    assert not results[0]["plain"]["log"]
    for name in ("exact", "sparse", "accelerate"):
        assert results[0][name]["hash"] == results[1][name]["hash"]
        assert "active on ZeRO stage 1" in results[0][name]["log"][0]


def test_torch_ddp_takes_the_hook(tmp_path: Path) -> None:
    plan = [
        {"id": "trainer", "example": "hf_trainer", "arguments": ["--steps", "18"]},
        {"id": "accelerate", "example": "hf_accelerate", "arguments": ["--steps", "30"]},
    ]
    results, printed = run(plan, tmp_path)
    for name in ("trainer", "accelerate"):
        assert results[0][name]["hash"] == results[1][name]["hash"]
        assert results[0][name]["losses"][-1] < results[0][name]["losses"][0]
    assert "dct: 18 steps, rank 0 sent" in printed
    assert "dct: 30 steps, rank 0 sent" in printed
