"""Test-only: a small GPT of megatron-core's own parts, trained with Megatron's own schedules."""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dct_plugin.metrics import HOST
from support import given_times, megatron_cpu, with_local_feedback
from support.groups_made import groups_made


@dataclass(frozen=True)
class Job:
    """One training run. ``dct`` is a ``dct`` section; None trains with Megatron alone."""

    tp: int = 1
    pp: int = 1
    vpp: int = 0
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    instances: int = 1
    """Instances of the distributed optimizer (Megatron's HSDP)."""
    bucket_size: int = 40_000
    overlap_grad_reduce: bool = False
    overlap_p2p: bool = False
    bf16: bool = False
    fp16: bool = False
    loss_scale: float = 2.0**14
    loss_scale_window: int = 1000
    experts: int = 0
    ep: int = 1
    recompute: str = ""
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    seq: int = 32
    micro_batch: int = 2
    micro_batches: int = 4
    steps: int = 4
    vocab: int = 64
    lr: float = 1e-3
    cosine: bool = False
    """20 steps of rising learning rate, then a cosine to a twentieth."""
    seed: int = 123
    tied_embeddings: bool = True
    frozen_stage: int | None = None
    """The pipeline stage whose parameters are not trained."""
    frozen_linears: bool = False
    """Train embeddings and norms alone."""
    adapters: bool = False
    """Freeze all parameters, and give row-parallel linears LoRA adapters."""
    unfreeze: int | None = None
    """Before this step the frozen parameters are unfrozen, but the model is not wrapped anew."""
    engine: bool = False
    """Take the linears of Transformer Engine, as Megatron does on GPUs, with Megatron's own attention."""
    fused: bool = False
    """Fuse the operations that Megatron's ``jit_fuser`` compiles."""
    positional: bool = False
    """Give the functions of parallel linears their arguments by position."""
    outside: str = ""
    """Put this behind the transformer layers: a parallel ``linear``, or a ``mamba`` layer with a stub of its
    mixer, which needs CUDA.
    """
    save: tuple[str, int] | None = None
    """Folder, and after how many steps a checkpoint goes there."""
    load: tuple[str, int] | None = None
    """Folder, and how many steps the checkpoint there has seen."""
    load_optimizer: bool = True
    """Load the optimizer's shards, too, which are those of as many ranks and instances."""
    watch: bool = False
    """Keep the plugin's state after every step."""
    evaluate: bool = False
    evaluate_between: bool = False
    """Evaluate after every step, too."""
    evaluation_rounds: int = 1
    optimizer: str = "adam"
    extra_steps: tuple[int, ...] = ()
    """After these steps the optimizer takes another one, without a forward pass between."""
    rejected: tuple[int, ...] = ()
    """Before these steps a batch runs whose gradients are cleared without a step."""
    through_codec: bool = False
    whole_gathers: bool = False
    """Whole gathers are faster than exact updates, and the next trial of both begins after one step."""
    device: str = "cpu"
    """``cpu`` makes Megatron, which asks for CUDA by name, take the CPU."""
    dct: dict[str, Any] | None = field(default=None)

    def with_dct(self, dct: dict[str, Any] | None, **changes: Any) -> Job:
        """The same run with other settings of the plugin; local feedback unless they name another."""
        return replace(self, dct=with_local_feedback(dct), **changes)


@dataclass
class Outcome:
    """What a run gave on this rank: losses (last stage), a hash of the parameters, the plugin's summary."""

    losses: list[float]
    evaluations: list[float]
    parameters: str
    skipped: int
    active: list[str]
    classes: dict[str, dict[str, float]]
    history: list[tuple[bool, float, dict[str, Any]]] = field(default_factory=list)
    """Of every step: whether the optimizer took it, the loss scale after it, the plugin's state."""
    log: list[str] = field(default_factory=list)
    groups_made: int = 0
    """Process groups that were made since the first forward pass."""


def counting(job: Job, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences that count in sevens from a random start: learnt in a few steps."""
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        start = torch.randint(0, job.vocab, (job.micro_batch, 1), generator=generator)
        tokens = (start + 7 * torch.arange(job.seq + 1)) % job.vocab
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(
    job: Job,
    batches: Callable[[Job, int], Iterator[tuple[torch.Tensor, torch.Tensor]]] = counting,
    held_out: Callable[[Job, int], Iterator[tuple[torch.Tensor, torch.Tensor]]] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> Outcome:
    """Build this rank's part of the model and train it. The process group exists already."""
    warnings.filterwarnings("ignore")
    if job.whole_gathers:
        given_times.give(lambda whole: 2.0 - whole, period=1)
    else:
        given_times.exact_updates_are_faster()
    if job.device == "cpu":
        megatron_cpu.install()
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dct_plugin.config import DCTConfig
    from dct_plugin.integrations.megatron import hooks

    if job.device == "cpu":
        megatron_cpu.patch_megatron()
    if job.positional:
        for linear in (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear):
            linear._forward_impl = _by_position
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dct_plugin").addHandler(handler)
    if job.experts:
        from megatron.core.transformer.moe import moe_utils

        vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16 forgets it without Transformer Engine
    active = {}
    if job.dct is not None:
        active = hooks.install(DCTConfig.parse(job.dct), pass_through=not job.through_codec)
    _enter_groups(job, ps)
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(job.seed)
        torch.manual_seed(job.seed + ps.get_pipeline_model_parallel_rank())
        dtype = torch.bfloat16 if job.bf16 else torch.float16 if job.fp16 else torch.float32
        recompute: dict[str, Any] = {}
        if job.recompute == "full":
            recompute = {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        config = TransformerConfig(
            num_layers=job.layers, hidden_size=job.hidden, num_attention_heads=job.heads,
            ffn_hidden_size=4 * job.hidden, tensor_model_parallel_size=job.tp,
            pipeline_model_parallel_size=job.pp, virtual_pipeline_model_parallel_size=job.vpp or None,
            sequence_parallel=job.sequence_parallel, use_cpu_initialization=True,
            pipeline_dtype=dtype, params_dtype=dtype, bf16=job.bf16, fp16=job.fp16,
            hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False,
            bias_dropout_fusion=job.fused, bias_activation_fusion=job.fused, masked_softmax_fusion=False,
            persist_layer_norm=False, overlap_p2p_comm=job.overlap_p2p, batch_p2p_comm=not job.overlap_p2p,
            # gloo reads a message after isend() returns, so with overlap Megatron must not free it.
            deallocate_pipeline_outputs=not job.overlap_p2p, **recompute,
            num_moe_experts=job.experts or None, expert_model_parallel_size=job.ep,
            moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
        )  # fmt: skip

        def build(chunk: int | None) -> torch.nn.Module:
            stage = {"ignore_virtual": False, "vp_stage": chunk} if chunk is not None else {}
            experts: dict[str, Any] = {"num_experts": job.experts or None, "moe_grouped_gemm": False}
            if job.engine:
                layers = get_gpt_layer_with_transformer_engine_spec(**experts)
                local = get_gpt_layer_local_spec(**experts, normalization="LayerNorm")
                attention = layers.submodules.self_attention.submodules
                attention.core_attention = local.submodules.self_attention.submodules.core_attention
            else:
                layers = get_gpt_layer_local_spec(**experts, normalization="LayerNorm")
            return GPTModel(
                config=config, transformer_layer_spec=layers,
                vocab_size=job.vocab, max_sequence_length=job.seq,
                pre_process=ps.is_pipeline_first_stage(**stage),
                post_process=ps.is_pipeline_last_stage(**stage),
                share_embeddings_and_output_weights=job.tied_embeddings,
                position_embedding_type="learned_absolute",
                vp_stage=chunk,
            )  # fmt: skip

        chunks = [build(chunk) for chunk in range(job.vpp)] if job.vpp else [build(None)]
        if ps.get_pipeline_model_parallel_rank() == job.frozen_stage:
            for chunk in chunks:
                chunk.requires_grad_(False)
        for chunk in chunks:
            if job.frozen_linears:
                named = chunk.decoder.named_modules()
                for module in (module for name, module in named if ".linear_" in name):
                    module.weight.requires_grad_(False)
            if job.adapters:
                chunk.requires_grad_(False)
                rows = (
                    m for m in chunk.decoder.modules() if isinstance(m, tensor_parallel.RowParallelLinear)
                )
                for number, linear in enumerate(list(rows)):
                    _adapt(linear, config, job.seed + number)
            if job.outside:
                chunk.decoder.register_forward_hook(_outside(config, job.outside))
        if job.bf16 or job.fp16:
            chunks = [Float16Module(config, chunk) for chunk in chunks]
        chunks = [chunk.to(job.device) for chunk in chunks]
        overlap_params = job.overlap_grad_reduce and job.distributed_optimizer
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=job.distributed_optimizer, overlap_grad_reduce=job.overlap_grad_reduce,
            overlap_param_gather=overlap_params, grad_reduce_in_fp32=job.bf16 or job.fp16,
            bucket_size=job.bucket_size,
            check_for_nan_in_grad=False, num_distributed_optimizer_instances=job.instances,
        )  # fmt: skip
        models = [
            DistributedDataParallel(config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(chunks)
        ]
        for model in models:
            model.broadcast_params()
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=job.optimizer, lr=job.lr, weight_decay=0.0, clip_grad=1.0,
                bf16=job.bf16, fp16=job.fp16, params_dtype=dtype,
                use_distributed_optimizer=job.distributed_optimizer, overlap_param_gather=overlap_params,
                initial_loss_scale=job.loss_scale, hysteresis=1, loss_scale_window=job.loss_scale_window,
            ),
            models,
        )  # fmt: skip
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        if job.overlap_grad_reduce:
            config.no_sync_func = models[0].no_sync if len(models) == 1 else [m.no_sync for m in models]
        outcome = _run(
            job, models, optimizer, get_forward_backward_func(), batches, held_out, on_step, active, ps
        )
        return replace(outcome, log=lines)
    finally:
        hooks.uninstall()
        logging.getLogger("dct_plugin").removeHandler(handler)


def _enter_groups(job: Job, ps: Any) -> None:
    """Make Megatron's process groups, or take those of an earlier run of this process with the same sizes:
    Megatron makes some fifty, and runs of small models would take longer to connect them than to train.
    """
    states: dict[Any, dict[str, Any]] = vars(ps).setdefault("states_by_sizes", {None: _state(ps)})
    sizes = (job.tp, job.pp, job.vpp, job.ep, job.instances)
    if sizes not in states:
        vars(ps).update(states[None])
        ps.initialize_model_parallel(
            job.tp, job.pp, virtual_pipeline_model_parallel_size=job.vpp or None,
            expert_model_parallel_size=job.ep, num_distributed_optimizer_instances=job.instances,
        )  # fmt: skip
        states[sizes] = _state(ps)
    vars(ps).update(states[sizes])


def _state(ps: Any) -> dict[str, Any]:
    """Return the groups, ranks and sizes of Megatron, which are global variables of a module."""
    return {name: value for name, value in vars(ps).items() if name[0] == "_" and name.isupper()}


def _by_position(linear: Any, input: Any, weight: Any, **given: Any) -> torch.Tensor:
    """Do what ``_forward_impl`` of parallel linears does."""
    from megatron.core.tensor_parallel import layers

    function = (
        layers.linear_with_grad_accumulation_and_async_allreduce
        if weight.requires_grad
        else layers.linear_with_frozen_weight
    )
    names = ("bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel")
    first = {"bias": given.pop("bias")}
    rest = [given.get(name) for name in names[1:]]
    parameters = list(inspect.signature(function).parameters)[6:]
    return function(input, weight, *first.values(), *rest, *(given.get(name) for name in parameters))


def _adapt(linear: Any, config: Any, seed: int, rank: int = 8) -> None:
    """Give a row-parallel linear a LoRA adapter, whose first half is a row-parallel linear, too."""
    generator = torch.Generator().manual_seed(seed)
    down = _row_parallel(linear.input_size, rank, config)
    up = torch.nn.Linear(rank, linear.output_size, bias=False)
    for part in (down, up):
        part.weight.data.copy_(0.1 * torch.randn(part.weight.shape, generator=generator))
    up.weight.sequence_parallel = config.sequence_parallel
    linear.adapter = torch.nn.ModuleList([down, up])

    def forward(module: Any, arguments: Any, output: Any) -> Any:
        return output[0] + up(down(arguments[0])[0]), *output[1:]

    linear.register_forward_hook(forward)


def _row_parallel(inputs: int, outputs: int, config: Any) -> Any:
    from megatron.core.tensor_parallel import RowParallelLinear

    return RowParallelLinear(
        inputs, outputs, config=config, init_method=torch.nn.init.zeros_, bias=False, input_is_parallel=True,
        skip_bias_add=False,
    )  # fmt: skip


def _mamba_layer(config: Any) -> Any:
    """Return Megatron's Mamba layer with a stub of its mixer: the parallel linears without what they mix."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class Mixer(torch.nn.Module):
        def __init__(self, config: Any, d_model: int, **_: Any) -> None:
            super().__init__()
            self.in_proj = ColumnParallelLinear(
                d_model, 2 * d_model, config=config, init_method=torch.nn.init.normal_, bias=False,
                skip_bias_add=False, gather_output=False,
            )  # fmt: skip
            self.out_proj = _row_parallel(2 * d_model, d_model, config)

        def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return self.out_proj(torch.tanh(self.in_proj(hidden)[0]))[0], None

    parts = MambaLayerSubmodules(mixer=Mixer, mamba_bda=get_bias_dropout_add)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return MambaLayer(config, parts, layer_number=config.num_layers, pg_collection=groups)


def _outside(config: Any, kind: str) -> Callable[..., torch.Tensor]:
    """Return a forward hook that sends a module's output through a layer that is no transformer layer."""
    if kind == "mamba":
        layer = _mamba_layer(config)
        return lambda module, arguments, output: layer(output)
    linear = _row_parallel(config.hidden_size, config.hidden_size, config)

    def forward(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        part = output[..., : linear.weight.shape[1]]
        if config.sequence_parallel:
            part = part.repeat(config.tensor_model_parallel_size, 1, 1)
        return output + linear(part.contiguous())[0]

    return forward


def _run(
    job: Job, models: list[Any], optimizer: Any, schedule: Any, batches: Any, held_out: Any, on_step: Any,
    active: dict[str, str], ps: Any,
) -> Outcome:  # fmt: skip
    from dct_plugin.integrations.megatron import hooks

    mask = torch.triu(torch.ones(1, 1, job.seq, job.seq, dtype=torch.bool, device=job.device), 1)
    positions = torch.arange(job.seq, device=job.device).unsqueeze(0).expand(job.micro_batch, -1)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def forward_step(data: Any, model: Any) -> Any:
        tokens, labels = (part.to(job.device) for part in next(data))
        return model(tokens, positions, mask, labels=labels), loss_of

    def streams(source: Any) -> list[Any]:  # every chunk of an interleaved schedule reads the same batches
        return [source(job, ps.get_data_parallel_rank()) for _ in models]

    def run(data: list[Any], forward_only: bool) -> float:
        result = schedule(
            forward_step_func=forward_step, data_iterator=data if job.vpp else data[0],
            model=models, num_microbatches=job.micro_batches, seq_length=job.seq,
            micro_batch_size=job.micro_batch, forward_only=forward_only,
        )  # fmt: skip
        return sum(float(part["loss"]) for part in result) / len(result) if result else float("nan")

    data, losses, evaluations, skipped = streams(batches), [], [], 0
    history: list[tuple[bool, float, dict[str, Any]]] = []
    first = 0
    if job.load is not None:
        folder, first = job.load
        _load(folder, models, optimizer if job.load_optimizer else None)
        hooks.load_checkpoint(folder)
        for source in data:
            for _ in range(first * job.micro_batches):
                next(source)

    def clear() -> None:
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()

    def keep(success: bool) -> None:
        scale = float(optimizer.get_loss_scale())
        history.append((success, scale, copy.deepcopy(hooks.state_dict())))

    for step in range(first, job.steps):
        if step == job.unfreeze:
            for model in models:
                model.module.requires_grad_(True)
        clear()
        if step in job.rejected:
            run(streams(batches), forward_only=False)
            clear()
            keep(False)
        if job.cosine:
            fall = 0.05 + 0.475 * (1 + math.cos(math.pi * step / job.steps))
            for group in optimizer.param_groups:
                group["lr"] = job.lr * min(1.0, (step + 1) / 20) * fall
        losses.append(run(data, forward_only=False))
        for _ in range(1 + (step in job.extra_steps)):
            success, _, _ = optimizer.step()
            skipped += not success
        if job.watch:
            keep(bool(success))
        if job.save is not None and step + 1 == job.save[1]:
            folder = job.save[0]
            hooks.gather_parameters()
            _save(folder, models, optimizer)
            hooks.save_checkpoint(folder)
        if on_step is not None:
            on_step(step)
        if job.evaluate_between:
            with torch.no_grad():
                evaluations.append(run(streams(held_out or batches), forward_only=True))
    if job.evaluate or held_out is not None:
        for model in models:
            model.eval()
        test = streams(held_out or batches)
        with torch.no_grad():
            evaluations += [run(test, forward_only=True) for _ in range(job.evaluation_rounds)]
    parameters = b"".join(p.detach().float().cpu().numpy().tobytes() for m in models for p in m.parameters())
    classes: dict[str, dict[str, float]] = {}
    session = hooks.current()
    if session is not None:
        session.end_step()
        found = session.metrics.summary().classes
        classes = {n: dict(vars(part)) for n, part in found.items() if not n.startswith(HOST)}
    last = ps.is_pipeline_last_stage(ignore_virtual=True)
    return Outcome(
        losses if last else [], evaluations if last else [], hashlib.sha256(parameters).hexdigest(), skipped,
        list(active), classes, history,
    )  # fmt: skip


def _sharded(models: list[Any], optimizer: Any, loading: bool = False) -> dict[str, Any]:
    state = {f"model{number}": model.module.sharded_state_dict() for number, model in enumerate(models)}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=loading)
    return state


def _save(folder: str, models: list[Any], optimizer: Any) -> None:
    """As ``--ckpt-format torch_dist`` does; with the distributed optimizer, a file per rank.

    megatron-core 0.16 cannot load that one's state without Apex or Transformer Engine.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    Path(folder).mkdir(parents=True, exist_ok=True)
    if hasattr(_only(optimizer), "save_parameter_state"):
        inner = _only(optimizer).optimizer.state_dict()
        masters = _only(optimizer).shard_fp32_from_float16_groups
        state = {"models": [m.state_dict() for m in models], "optimizer": inner, "masters": masters}
        torch.save(state, f"{folder}/rank{dist.get_rank()}.pt")
        return
    # Megatron's own process of this queue is a new interpreter, and would outlive this one.
    with multiprocessing.get_context("fork").Manager() as manager:
        filesystem_async._results_queue = manager.Queue()
        dist_checkpointing.save(_sharded(models, optimizer), folder)
    filesystem_async._results_queue = None


def _load(folder: str, models: list[Any], optimizer: Any) -> None:
    from megatron.core import dist_checkpointing

    if optimizer is None or hasattr(_only(optimizer), "save_parameter_state"):
        state = torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=False)
        for model, part in zip(models, state["models"], strict=True):
            model.load_state_dict(part)
        if optimizer is None:
            return
        _only(optimizer).optimizer.load_state_dict(state["optimizer"])
        masters = _only(optimizer).shard_fp32_from_float16_groups
        for group, saved in zip(masters, state["masters"], strict=True):
            for master, part in zip(group, saved, strict=True):
                master.data.copy_(part)
        return
    state = dist_checkpointing.load(_sharded(models, optimizer, loading=True), folder)
    for number, model in enumerate(models):
        model.module.load_state_dict(state[f"model{number}"])
    optimizer.load_state_dict(state["optimizer"])


def _only(optimizer: Any) -> Any:
    return getattr(optimizer, "chained_optimizers", [optimizer])[0]


def train_all(rank: int, world_size: int, jobs: list[Job]) -> list[Outcome]:
    """Several runs one after the other in the same processes."""
    torch.set_num_threads(1)
    outcomes = []
    for job in jobs:
        dist.barrier()
        with groups_made() as made:
            outcome = train(job)
        outcomes.append(replace(outcome, groups_made=made["in passes"]))
    return outcomes
