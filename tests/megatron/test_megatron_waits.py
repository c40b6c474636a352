"""How often the host waits for a device whose kernels write the messages; the real megatron-core."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from support import processes
from support.host_reads import HostReads

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)
pytest.importorskip("triton", reason="triton is for Linux only")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu has these kernels"),
]


def _waits(rank: int, world_size: int, backend: str) -> tuple[list[torch.Tensor], list[int]]:
    """Three steps of a model with gradients in two buffers: the last ones, and the waits of each."""
    from support import megatron_cpu

    megatron_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from dct_plugin import kernels
    from dct_plugin.config import DCTConfig
    from dct_plugin.integrations.megatron import hooks
    from dct_plugin.kernels.reference import ReferenceBackend
    from dct_plugin.kernels.triton.backend import TritonBackend

    kernels.register_backend("plain", ReferenceBackend)
    kernels.register_backend("interpreted", TritonBackend)
    hooks.install(
        DCTConfig.parse(
            {
                "data_parallel": {"sparsity": 0.9, "min_numel": 100},
                "kernels": {"backend": backend},
            }
        )
    )
    parallel_state.initialize_model_parallel()
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(40, 30), "two": torch.nn.Linear(50, 20).bfloat16()})
    ddp = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        DistributedDataParallelConfig(),
        model,
    )
    waits, session = [], hooks.current()
    assert session is not None
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for parameter in ddp.module.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        session.begin(training=True)
        with HostReads() as reads:
            ddp.finish_grad_sync()
        waits.append(sum(place == "codecs/copies.py:cpu" for place in reads.places))
        session.end_step()
    assert len(ddp.bucket_groups) == 2
    gradients = [parameter.main_grad.clone() for parameter in ddp.module.parameters()]
    hooks.uninstall()
    parallel_state.destroy_model_parallel()
    return gradients, waits


def test_all_gradient_buffers_of_a_model_are_waited_for_at_once() -> None:
    expected, found = (processes.run(2, _waits, backend) for backend in ("plain", "interpreted"))
    for (mine, waits), (other, _) in zip(found, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
        assert waits[2] == 1
