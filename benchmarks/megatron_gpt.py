"""Steps of a small GPT of megatron-core's own parts under Megatron's own schedules, on links of limited rate.

    python benchmarks/megatron_gpt.py --minutes 1.3

On CPU, two ranks: PP 2, and DP 2. The hooks belong to a whole process, so dense and DCT have ranks of their
own; ``dct`` says which these are. Run it in the root of the repository. It needs what
`python -m benchmarks.links` does.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dct_plugin.config import DCTConfig
from dct_plugin.metrics import format_bytes
from dct_plugin.rates import rate_name
from dct_plugin.recommender.links.interleave import interleaved, warmed
from dct_plugin.recommender.links.method import Method
from dct_plugin.recommender.links.namespaces import Links
from dct_plugin.recommender.links.team import NETWORKS, Block, Team

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support import megatron_cpu

TARGET = "benchmarks.megatron_gpt:Megatron"

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH = 4, 256, 4, 512, 64, 8
LEARNING_RATE = 1e-3
#: Variant -> pipeline stages, micro-batches, ``dct`` section.
VARIANTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "PP 2": (
        2,
        4,
        {
            "data_parallel": {"enabled": False},
            "model_parallel": {"pipeline": {"forward": {"method": "threshold", "sparsity": 0.75}}},
        },
    ),
    "DP 2": (1, 1, {"data_parallel": {"sparsity": 0.9, "feedback": "local"}}),
    "DP 2, distributed optimizer": (1, 1, {"data_parallel": {"sparsity": 0.9, "feedback": "local"}}),
    "DP 2, distributed optimizer, updates": (
        1,
        1,
        {"data_parallel": {"sparsity": 0.9, "feedback": "local", "parameters": {}}},
    ),
}


class Megatron:
    """Options: ``dct``, whether the hooks are there, ``batch``, ``layers`` and ``hidden``. Variants: those of
    :data:`VARIANTS`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._dct, self._batch = bool(options["dct"]), int(options.get("batch", BATCH))
        self._layers, self._hidden = int(options.get("layers", LAYERS)), int(options.get("hidden", HIDDEN))
        warnings.filterwarnings("ignore")
        megatron_cpu.install()
        megatron_cpu.patch_megatron()

    def open(self, variant: str) -> list[Method]:
        """One method."""
        from megatron.core import parallel_state, tensor_parallel

        from dct_plugin.integrations.megatron import hooks

        stages, micro_batches, section = VARIANTS[variant]
        if self._dct:
            hooks.install(DCTConfig.parse(section))
        parallel_state.initialize_model_parallel(1, stages)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        sharded = "optimizer" in variant
        config = transformer_config(self._layers, self._hidden, HEADS)
        made = training(config, micro_batches, self._batch, distributed_optimizer=sharded)
        step = partial(made.step, batches(self._batch))
        session = hooks.current()
        if session is None:
            return [Method("dense", step)]
        return [Method("DCT", step, [session.metrics], warmup=8)]

    def close(self) -> None:
        from megatron.core import parallel_state

        from dct_plugin.integrations.megatron import hooks

        hooks.uninstall()
        parallel_state.destroy_model_parallel()


class Training(NamedTuple):
    """This rank's part of a model, its optimizer, and a step with micro-batches of tokens."""

    model: Any
    optimizer: Any
    step: Callable[[Iterator[Tensor]], None]


def training(
    config: Any,
    micro_batches: int,
    batch: int,
    *,
    length: int = LENGTH,
    vocabulary: int = VOCABULARY,
    distributed_optimizer: bool = False,
) -> Training:
    """Build this rank's part of the model."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    model = _model(config, length, vocabulary, distributed_optimizer=distributed_optimizer)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=0.0,
        params_dtype=torch.float32,
        use_distributed_optimizer=distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    schedule = get_forward_backward_func()
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    positions = torch.arange(length).unsqueeze(0).expand(batch, -1)

    def forward_step(source: Iterator[Tensor], module: Any) -> Any:
        tokens = next(source)
        return module(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), loss_of

    def step(data: Iterator[Tensor]) -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=micro_batches,
            seq_length=length,
            micro_batch_size=batch,
            forward_only=False,
        )
        optimizer.step()

    return Training(model, optimizer, step)


def transformer_config(layers: int, hidden: int, heads: int) -> Any:
    """Return Megatron's settings of a GPT on CPU, for the parallelism that is initialized."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=4 * hidden,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=True,
    )


def _model(config: Any, length: int, vocabulary: int, *, distributed_optimizer: bool) -> Any:
    """Return this rank's part of the GPT in Megatron's own DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            check_for_nan_in_grad=False, use_distributed_optimizer=distributed_optimizer
        ),
        GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=vocabulary,
            max_sequence_length=length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="learned_absolute",
        ),
    )
    model.broadcast_params()
    return model


def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over the tokens, as Megatron's schedules want it."""
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def batches(size: int) -> Iterator[Tensor]:
    """Sequences that count in sevens from a random start, int64 [size, 65]."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(1 + parallel_state.get_data_parallel_rank())
    while True:
        start = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
        yield (start + 7 * torch.arange(LENGTH + 1)) % VOCABULARY


def measure(variants: list[str], rates: list[str | None], seconds: float, folder: Path) -> None:
    """Print a table for each variant: milliseconds per step on links of every rate."""
    with Links(2, NETWORKS) as links, ExitStack() as stack:
        teams = [
            stack.enter_context(
                Team(TARGET, 2, links, options={"dct": dct}, folder=folder, name=f"megatron-{dct}")
            )
            for dct in (False, True)
        ]
        for variant in variants:
            links.limit(None)
            opened = [(team, team.open(variant)) for team in teams]
            owners = {name: team for team, methods in opened for name in methods}

            def take(method: str, steps: int, owners: Mapping[str, Team] = owners) -> Block:
                return owners[method].block(method, steps)

            warmed(take, {name: steps for _, methods in opened for name, steps in methods.items()})
            cells: dict[str, list[str]] = {}
            for rate in rates:
                links.limit(rate)
                for one in interleaved(take, list(owners), seconds / len(variants) / len(rates)):
                    low, high = one.quartiles
                    cells.setdefault(one.name, [one.name, format_bytes(one.sent)])
                    cells[one.name].append(f"{one.median:.0f} ±{(high - low) / 2:.0f}")
            for team in teams:
                team.close()
            header = ["", "sent", *("unlimited" if rate is None else rate_name(rate) for rate in rates)]
            rows = [header, ["---", *["--:"] * (len(header) - 1)], *cells.values()]
            print(
                f"{variant}: ms per step, median ± half the interquartile range; bytes per step, all ranks\n"
            )
            print("\n".join(f"| {' | '.join(row)} |" for row in rows), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=["PP 2", "DP 2"])
    parser.add_argument("--rates", nargs="*", default=["unlimited", "10gbit", "1gbit", "100mbit"])
    parser.add_argument("--minutes", type=float, default=1.3)
    parser.add_argument(
        "--out", type=Path, default=Path("out/megatron"), help="Folder for the ranks' output."
    )
    args = parser.parse_args()
    rates = [None if rate == "unlimited" else rate for rate in args.rates]
    measure(args.variants, rates, 60 * args.minutes, args.out)


if __name__ == "__main__":
    main()
