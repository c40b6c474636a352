"""Scripts may set torch's default device, or its default type: the plugin depends on neither."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from support import ROOT
from support.processes import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dct_plugin

#: Functions that make tensors on the default device, and those of them that make floating-point numbers.
MAKERS = {"zeros", "ones", "empty", "full", "arange", "tensor", "linspace", "randn", "rand", "randint", "eye"}
FLOATS = {"zeros", "ones", "empty", "randn", "rand", "eye"}
KEYS = {"sparsity": 0.9, "warmup_steps": 2, "sparsity_warmup_steps": 0, "min_numel": 16}
SECTIONS: dict[str, dict[str, Any]] = {
    "step-ahead": {**KEYS, "verify": {"every": 3, "action": "stop", "conservation": True}},
    "int8 residuals": {**KEYS, "feedback": "local", "residual_dtype": "int8", "nonfinite_action": "skip"},
    "4-bit levels": {"sparsity": 0, "value_dtype": "log4"},
    "accordion": {**KEYS, "adaptive": "accordion"},
    "two phases": {**KEYS, "exchange": "two_phase"},
    "local steps": {"local_steps": 3, "warmup_steps": 2},
    "updates": {"exchange_of": "updates", "warmup_steps": 2},
}


def test_every_tensor_of_the_package_names_its_device_and_its_type() -> None:
    """Parameters and buffers are the script's, as are an empty tensor that stands for none, and the seed."""
    found = []
    for path in sorted((ROOT / "dct_plugin").rglob("*.py")):
        if {"recommender", "triton"} & set(path.parts):
            continue
        tree, ours = ast.parse(path.read_text(encoding="utf-8")), set[ast.AST]()
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).endswith(("Parameter", "register_buffer", "draw_table")):
                ours |= set(ast.walk(call))
            name, words = ast.unparse(call.func), {word.arg for word in call.keywords}
            maker = name.removeprefix("torch.")
            lacks = "device" not in words or (maker in FLOATS and "dtype" not in words)
            if name == f"torch.{maker}" and maker in MAKERS and lacks and call not in ours:
                found.append(f"{path.name}: {ast.unparse(call)}")
    allowed = ("torch.empty(0)", "torch.empty(0, stop - start, device='cpu')", "torch.randint(2 ** 62, ())")
    assert [each for each in found if not each.endswith(allowed)] == []


def _trained(rank: int, world_size: int, elsewhere: bool) -> dict[str, Tensor]:
    """Train with each section; ``elsewhere``: torch's default device is one without memory."""
    weights = {}
    for name, keys in SECTIONS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 32))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(rank)
        batches = [torch.randn(16, 64, generator=generator) for _ in range(12)]
        torch.set_default_device("meta" if elsewhere else "cpu")
        state = dct_plugin.attach(ddp, optimizer, {"data_parallel": keys})
        for x in batches:
            optimizer.zero_grad()
            (ddp(x) - x[:, :32].sin()).square().mean().backward()
            optimizer.step()
        state.load_state_dict(state.state_dict())
        state.finish()
        torch.set_default_device("cpu")
        weights[name] = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return weights


@pytest.mark.slow
def test_a_job_is_the_same_whatever_the_default_device() -> None:
    for here, elsewhere in zip(run(2, _trained, False), run(2, _trained, True), strict=True):
        assert [name for name in SECTIONS if not torch.equal(here[name], elsewhere[name])] == []
