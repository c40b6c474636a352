"""The script of the page about FSDP2 that starts torchtitan, where that is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fsdp.torchtitan_job import STEPS
from support import ROOT
from support.deepspeed_launch import environment
from torch.distributed.checkpoint import FileSystemReader

from dct_plugin.recommender.links.team import free_port

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_two_replicas_train_and_save_what_is_not_sent(tmp_path: Path) -> None:
    """Real torchtitan on the CPU: every name that the script uses is there."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("torchtitan", reason="pip install torchtitan")
    page = (ROOT / "docs" / "fsdp-reference.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^## torchtitan\n.*?^```python\n(.*?)^```", page, re.M | re.S)
    section = '{"metrics": {"path": "metrics.jsonl", "every": 1}, "data_parallel": {"warmup_steps": 1}}'
    assert "SECTION = {}" in script
    (tmp_path / "script.py").write_text(script.replace("SECTION = {}", f"SECTION = {section}"))
    words = {str(each): each for each in range(97)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", str(ROOT / "tests" / "fsdp" / "torchtitan_job.py")]
    command += ["script.py", "--module", "fsdp.torchtitan_job", "--config", "small"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(TORCHDYNAMO_DISABLE="1", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line).get("step") for line in lines} >= {*range(1, STEPS + 1)}
    (checkpoint,) = (tmp_path / "outputs" / "checkpoint").iterdir()
    assert checkpoint.name == f"step-{STEPS}"
    names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert "dct.residuals.layers.0.feed_forward.w1.weight" in names
