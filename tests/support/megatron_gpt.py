"""Test-only: a small GPT of megatron-core's own parts, trained with Megatron's own schedules."""

from __future__ import annotations

import copy
import hashlib
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
from support.processes import logged


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
    recompute: str | None = None
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    seq: int = 32
    micro_batch: int = 2
    micro_batches: int = 4
    steps: int = 4
    vocab: int = 64
    lr: float = 1e-3
    seed: int = 123
    tied_embeddings: bool = True
    prepare: Callable[[torch.nn.Module, Any], None] | None = None
    """Changes each part of the model before Megatron wraps it; the second argument is its configuration."""
    before_step: Callable[[Training, int], None] | None = None
    """Is called when the gradients of the last step are cleared."""
    after_step: Callable[[Training, int], None] | None = None
    """Is called when the optimizer has taken the step."""
    engine: bool = False
    """Take the linears of Transformer Engine, as Megatron does on GPUs, with Megatron's own attention."""
    fused: bool = False
    """Fuse the operations that Megatron's ``jit_fuser`` compiles."""
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
    through_codec: bool = False
    times: Callable[[], None] = given_times.exact_updates_are_faster
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
    classes: dict[str, dict[str, float]]
    history: list[tuple[bool, float, dict[str, Any]]] = field(default_factory=list)
    """Of every step: whether the optimizer took it, the loss scale after it, the plugin's state."""
    active: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    groups_made: int = 0
    """Process groups that were made since the first forward pass."""


#: Batches of a job for one rank of the data-parallel group.
Batches = Callable[[Job, int], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def counting(job: Job, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences that count in sevens from a random start: learnt in a few steps."""
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        start = torch.randint(0, job.vocab, (job.micro_batch, 1), generator=generator)
        tokens = (start + 7 * torch.arange(job.seq + 1)) % job.vocab
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(
    job: Job,
    batches: Batches = counting,
    held_out: Batches | None = None,
) -> Outcome:
    """Build this rank's part of the model and train it. The process group exists already."""
    with logged() as log:
        return replace(_train(job, batches, held_out), log=log)


def _train(job: Job, batches: Batches, held_out: Batches | None) -> Outcome:
    warnings.filterwarnings("ignore")
    job.times()
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
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dct_plugin.config import DCTConfig
    from dct_plugin.integrations.megatron import hooks

    if job.device == "cpu":
        megatron_cpu.patch_megatron()
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
            deallocate_pipeline_outputs=not job.overlap_p2p,
            recompute_granularity=job.recompute, recompute_method=job.recompute and "uniform",
            recompute_num_layers=job.recompute and 1,
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
        for chunk in chunks if job.prepare is not None else ():
            job.prepare(chunk, config)
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
        outcome = Training(job, models, optimizer).train(batches, held_out)
        return replace(outcome, active=list(active))
    finally:
        hooks.uninstall()


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


class Training:
    """This rank's part of a model under a schedule of Megatron."""

    def __init__(self, job: Job, models: list[Any], optimizer: Any) -> None:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from dct_plugin.integrations.megatron import hooks

        self.job, self.models, self.optimizer, self.hooks = job, models, optimizer, hooks
        self._schedule = get_forward_backward_func()
        self._history: list[tuple[bool, float, dict[str, Any]]] = []
        mask = torch.triu(torch.ones(1, 1, job.seq, job.seq, dtype=torch.bool, device=job.device), 1)
        self._inputs = torch.arange(job.seq, device=job.device).unsqueeze(0).expand(job.micro_batch, -1), mask

    def streams(self, source: Batches) -> list[Any]:
        """Return the batches of every chunk: those of an interleaved schedule read the same."""
        from megatron.core import parallel_state

        return [source(self.job, parallel_state.get_data_parallel_rank()) for _ in self.models]

    def run(self, data: list[Any], *, forward_only: bool = False) -> float:
        """Run the passes of a step, or of an evaluation; return the mean loss."""
        job = self.job
        result = self._schedule(
            forward_step_func=self._forward, data_iterator=data if job.vpp else data[0],
            model=self.models, num_microbatches=job.micro_batches, seq_length=job.seq,
            micro_batch_size=job.micro_batch, forward_only=forward_only,
        )  # fmt: skip
        return sum(float(part["loss"]) for part in result) / len(result) if result else float("nan")

    def _forward(self, data: Any, model: Any) -> Any:
        tokens, labels = (part.to(self.job.device) for part in next(data))

        def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = output.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return model(tokens, *self._inputs, labels=labels), loss_of

    def clear(self) -> None:
        """Clear the gradients."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def keep(self, success: bool) -> None:
        """Keep the plugin's state after a step that the optimizer took, or did not."""
        scale = float(self.optimizer.get_loss_scale())
        self._history.append((success, scale, copy.deepcopy(self.hooks.state_dict())))

    def train(self, batches: Batches, held_out: Batches | None) -> Outcome:
        """Make all steps of the job."""
        job, data, losses, evaluations, skipped = self.job, self.streams(batches), [], [], 0
        first = 0
        if job.load is not None:
            folder, first = job.load
            _load(folder, self.models, self.optimizer if job.load_optimizer else None)
            self.hooks.load_checkpoint(folder)
            for source in data:
                for _ in range(first * job.micro_batches):
                    next(source)
        for step in range(first, job.steps):
            self.clear()
            if job.before_step is not None:
                job.before_step(self, step)
            losses.append(self.run(data))
            success, _, _ = self.optimizer.step()
            skipped += not success
            if job.watch:
                self.keep(bool(success))
            if job.save is not None and step + 1 == job.save[1]:
                folder = job.save[0]
                self.hooks.gather_parameters()
                _save(folder, self.models, self.optimizer)
                self.hooks.save_checkpoint(folder)
            if job.after_step is not None:
                job.after_step(self, step)
            if job.evaluate_between:
                with torch.no_grad():
                    evaluations.append(self.run(self.streams(held_out or batches), forward_only=True))
        if job.evaluate or held_out is not None:
            for model in self.models:
                model.eval()
            test = self.streams(held_out or batches)
            with torch.no_grad():
                evaluations += [self.run(test, forward_only=True) for _ in range(job.evaluation_rounds)]
        return self._outcome(losses, evaluations, skipped)

    def _outcome(self, losses: list[float], evaluations: list[float], skipped: int) -> Outcome:
        from megatron.core import parallel_state

        held = (p.detach().float().cpu().numpy() for model in self.models for p in model.parameters())
        parameters = hashlib.sha256(b"".join(each.tobytes() for each in held)).hexdigest()
        classes: dict[str, dict[str, float]] = {}
        if (session := self.hooks.current()) is not None:
            session.end_step()
            found = session.metrics.summary().classes
            classes = {n: dict(vars(part)) for n, part in found.items() if not n.startswith(HOST)}
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            losses, evaluations = [], []
        return Outcome(losses, evaluations, parameters, skipped, classes, self._history)


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


def freeze_linears(chunk: torch.nn.Module, config: Any) -> None:
    """Train embeddings and norms alone."""
    for name, module in chunk.named_modules():
        if "decoder" in name and ".linear_" in name:
            module.weight.requires_grad_(False)  # type: ignore[operator, union-attr]


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
