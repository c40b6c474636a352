"""Step-ahead error feedback in the real megatron-core, on CPU with gloo: who sees displaced weights."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import megatron_cpu, processes
from support.megatron_gpt import Job, Outcome, counting, train, train_all

from dct_plugin.policy import memory

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow


def section(sparsity: float = 0.99, **options: Any) -> dict[str, Any]:
    """A ``dct`` section with step-ahead; lossless values at sparsity 0."""
    data = {"sparsity": sparsity, "min_numel": 256, "feedback": "step_ahead"}
    if not sparsity:
        data["value_dtype"] = "fp32"
    return {"data_parallel": {**data, **options}}


def run(world_size: int, *jobs: Job) -> list[list[Outcome]]:
    """Outcomes by job, then rank."""
    by_rank = processes.run(world_size, train_all, list(jobs))
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def losses(outcomes: list[Outcome]) -> list[float]:
    return next(outcome.losses for outcome in outcomes if outcome.losses)


def parameters(outcomes: list[Outcome]) -> list[str]:
    return [outcome.parameters for outcome in outcomes]


def assert_same(plain: list[Outcome], hooked: list[Outcome]) -> None:
    assert losses(plain) == losses(hooked)
    assert parameters(plain) == parameters(hooked)
    assert all("data_parallel" in outcome.active for outcome in hooked)


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "distributed-optimizer"])
def test_two_data_parallel_ranks(sharded: bool) -> None:
    # The evaluation lets parameters arrive that overlap_param_gather would gather in the next iteration.
    job = Job(micro_batches=2, distributed_optimizer=sharded, steps=4, evaluate=True)
    ahead = section()
    plain, same, sparse, chosen, between, overlapped, local = run(
        2,
        job,
        job.with_dct(section(0.0), through_codec=True),
        job.with_dct(ahead),
        job.with_dct(section(feedback="auto", total_steps=1)),  # too short for a start
        job.with_dct(ahead, evaluate_between=True),
        job.with_dct(ahead, overlap_grad_reduce=True),  # and overlap_param_gather
        job.with_dct(section(feedback="local")),
    )
    assert_same(plain, same)
    assert parameters(sparse) == parameters(chosen)
    assert parameters(sparse) != parameters(local)
    assert losses(sparse)[0] == losses(local)[0]  # there is no residual yet
    assert losses(sparse)[1] != losses(local)[1]
    for outcomes in (sparse, between, overlapped):
        assert outcomes[0].parameters == outcomes[1].parameters
        if outcomes is not overlapped or not sharded:  # other buckets: the norm is summed in another order
            assert losses(outcomes) == losses(sparse)
            assert parameters(outcomes) == parameters(sparse)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_warm_up_is_megatrons_own(kind: str) -> None:
    """Its reductions are, bitwise; second moments have seen its gradients when residuals begin."""
    base = Job(
        micro_batches=2,
        lr=2e-3,
        **{kind: True},
        loss_scale=2.0**10,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
    )
    plain, warm, ramp = run(
        2,
        replace(base, steps=4),
        base.with_dct(section(warmup_steps=3), steps=4, watch=True),
        base.with_dct(section(0.9, sparsity_warmup_steps=3), steps=7, evaluate=True),
    )
    assert losses(warm) == losses(plain)
    for outcome in warm:
        reducer = outcome.history[2][2]["reducers"]["dense"]["state"]
        assert reducer["streams"] == {}
        steps = {part["steps"] for part in reducer["ahead"]["moments"].values()}
        assert steps == {3}
    assert ramp[0].parameters == ramp[1].parameters
    assert losses(ramp)[-1] < losses(ramp)[0] - 0.3


def test_fp16_overflow_is_rolled_back() -> None:
    """Second moments, too, are what they were before a step that is skipped, in the new unit."""
    job = Job(micro_batches=2, fp16=True, loss_scale=2.0**20, loss_scale_window=2, steps=12, watch=True)
    (outcomes,) = run(2, job.with_dct(section(0.9)))
    assert outcomes[0].parameters == outcomes[1].parameters
    assert torch.tensor(losses(outcomes)).isfinite().all()
    overflows = 0
    for (_, scale, before), (success, new_scale, after) in itertools.pairwise(outcomes[0].history):
        old, new = (state["reducers"]["dense"]["state"]["ahead"]["moments"] for state in (before, after))
        if success or not any(part["rows"].any() for part in old.values()):
            continue
        overflows += 1
        factor = (new_scale / scale) ** 2
        for name, part in old.items():
            assert torch.equal(new[name]["rows"], part["rows"] * factor), name
            assert new[name]["steps"] == part["steps"]
    assert overflows


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "distributed-optimizer"])
def test_resumed_training_is_bitwise_the_same(sharded: bool, tmp_path: Path) -> None:
    """From the first iteration on: it runs at displaced weights, whose residuals come from the files."""
    adaptive = section(adaptive={"kind": "accordion", "sparsity": 0.9, "interval": 2})
    job = Job(micro_batches=2, distributed_optimizer=sharded, overlap_grad_reduce=sharded, steps=6).with_dct(
        adaptive
    )
    where = (str(tmp_path), 3)
    (whole,) = run(2, replace(job, save=where))
    (resumed,) = run(2, replace(job, load=where))
    assert losses(whole)[3:] == losses(resumed)
    assert parameters(whole) == parameters(resumed)


def test_two_stages_of_two_ranks() -> None:
    """Tied embeddings have a copy on both stages; recomputed activations see the weights of the iteration."""
    job = Job(micro_batches=2, pp=2, steps=5)
    interleaved = replace(
        job, vpp=2, layers=4, bf16=True, distributed_optimizer=True, overlap_grad_reduce=True
    )
    interleaved = replace(interleaved, evaluate=True)
    plain, same, sparse, recomputed, chunks = run(
        4,
        job,
        job.with_dct(section(0.0), through_codec=True),
        job.with_dct(section()),
        job.with_dct(section(), recompute="full"),
        interleaved.with_dct(section()),
    )
    assert_same(plain, same)
    assert losses(recomputed) == losses(sparse)
    assert parameters(recomputed) == parameters(sparse)
    for outcomes in (sparse, chunks):
        first, second, third, fourth = parameters(outcomes)  # ranks 0 and 1 are the first stage
        assert first == second
        assert third == fourth


def test_tensor_parallel_and_experts() -> None:
    tensor = Job(micro_batches=2, tp=2, sequence_parallel=True, steps=4)
    experts = Job(micro_batches=2, layers=2, experts=2, ep=2, steps=4, distributed_optimizer=True)
    asked = section()
    asked["model_parallel"] = {"expert_gradients": True}
    cut, left, routed = run(
        4, tensor.with_dct(section()), experts.with_dct(section()), experts.with_dct(asked, watch=True)
    )
    for outcomes in (cut, left, routed):
        numbers = parameters(outcomes)
        assert numbers[0] == numbers[2]
        assert numbers[1] == numbers[3]
    assert parameters(left) != parameters(routed)
    moments = routed[0].history[-1][2]["reducers"]["expert"]["state"]["ahead"]["moments"]
    assert moments
    assert all("experts" in name for name in moments)


def _evaluated(rank: int, world_size: int, job: Job) -> list[float]:
    """Losses on data that is the same on all ranks."""
    torch.set_num_threads(1)
    return train(job, held_out=lambda job, _: counting(job, 7)).evaluations


def test_evaluation_sees_the_weights_themselves() -> None:
    first, second = processes.run(
        2, _evaluated, Job(micro_batches=2, steps=3, evaluate_between=True).with_dct(section())
    )
    assert len(first) == 4
    assert first == second


def _interrupted(rank: int, world_size: int) -> list[list[int]]:
    """Where the weights lie in the first iteration, in the third, and after that one has failed."""
    from dct_plugin.integrations.megatron import hooks
    from dct_plugin.integrations.megatron.data import DataParallelHook

    weights: list[torch.nn.Parameter] = []
    found: list[list[int]] = []

    def batches(job: Job, rank: int) -> Iterator[Any]:
        (hook,) = (hook for hook in hooks.current().hooks if isinstance(hook, DataParallelHook))
        for number, batch in enumerate(counting(job, rank)):
            if number in (0, 2 * job.micro_batches):
                weights[:] = [parameter for model in hook.models for parameter in model.parameters()]
                found.append([weight.data_ptr() for weight in weights])
            if number == 2 * job.micro_batches:
                raise RuntimeError("no more data")
            yield batch

    torch.set_num_threads(1)
    with pytest.raises(RuntimeError, match="no more data"):
        train(Job(micro_batches=2, steps=4).with_dct(section()), batches)
    return [*found, [weight.data_ptr() for weight in weights]]


def test_an_iteration_that_fails_leaves_the_weights_behind() -> None:
    for first, third, failed in processes.run(2, _interrupted):
        assert first != third
        assert first == failed


def _refused(rank: int, world_size: int) -> dict[str, str]:
    """Messages of what stops in the first training iteration."""
    from dct_plugin.data_parallel import step_units
    from dct_plugin.integrations.megatron import reductions as host

    def message(job: Job) -> str:
        try:
            train(job.with_dct(section()))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    torch.set_num_threads(1)
    found, rules, init = {}, dict(step_units._RULES), host.Optimizers._init
    step_units._RULES.clear()
    found["unknown"] = message(Job(steps=1))
    step_units._RULES.update(rules)
    # As if made before the hooks.
    host.Optimizers._init = lambda self, original, *arguments, **keywords: original(*arguments, **keywords)
    found["before"] = message(Job(steps=1))
    host.Optimizers._init = init
    return found


def test_sgd_has_a_unit_of_its_own() -> None:
    sparse, local = run(
        2,
        Job(micro_batches=2, optimizer="sgd", lr=0.1, steps=4).with_dct(section(0.9)),
        Job(micro_batches=2, optimizer="sgd", lr=0.1, steps=4).with_dct(section(0.9, feedback="local")),
    )
    assert sparse[0].parameters == sparse[1].parameters
    assert parameters(sparse) != parameters(local)
    assert losses(sparse)[-1] < losses(sparse)[0]


def test_optimizers_that_are_not_known_are_refused() -> None:
    found = processes.run(2, _refused)[0]
    assert "ConfigError: dct.data_parallel.feedback = 'step_ahead': the step of" in found["unknown"]
    assert "make model and optimizer after the hooks were installed" in found["before"]


def _wrapped_again(rank: int, world_size: int, sharded: bool) -> dict[str, Any]:
    """Two set-ups of one module; the second one starts dense. Then the hooks leave while it trains."""
    megatron_cpu.install()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dct_plugin.config import DCTConfig
    from dct_plugin.integrations.megatron import hooks

    megatron_cpu.patch_megatron()
    schedule = schedules.forward_backward_no_pipelining
    steps = {"warmup_steps": 4, "value_dtype": "fp32"}
    hooks.install(DCTConfig.parse(section(0.9, **steps)))
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
    )

    class Net(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.first, self.last = torch.nn.Linear(20, 64), torch.nn.Linear(64, 1)
            self.seen = torch.empty(0)

        def set_input_tensor(self, _: Any) -> None: ...

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = held(self)
            return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]

    def held(model: torch.nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()

    net, numbers = Net(), itertools.count()

    def forward_step(_: Any, model: Any) -> Any:
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(10 * next(numbers) + rank))
        return model(x), lambda out: (out.square().mean(), {})

    def train(models: Any, optimizer: Any, steps: int) -> list[float]:
        """Return how far the weights of the passes were from those before."""
        off = []
        for _ in range(steps):
            models[0].zero_grad_buffer()
            optimizer.zero_grad()
            before = held(net)
            schedules.forward_backward_no_pipelining(
                forward_step_func=forward_step, data_iterator=None, model=models, num_microbatches=1,
                seq_length=1, micro_batch_size=16, forward_only=False,
            )  # fmt: skip
            off.append(float((net.seen - before).abs().max()))
            optimizer.step()
        return off

    found: dict[str, Any] = {}
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded, check_for_nan_in_grad=False)
    kinds = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.0, "use_distributed_optimizer": sharded}
    try:
        for name in ("first", "second"):
            models = [DistributedDataParallel(config, ddp, net)]
            optimizer = get_megatron_optimizer(OptimizerConfig(**kinds), models)
            config.finalize_model_grads_func = finalize_model_grads
            found[name] = train(models, optimizer, 8)
        session: Any = hooks.current()
        reductions = [each for hook in session.hooks for each in getattr(hook, "reductions", ())]
        hooks.detach()
        found["last"] = train(models, optimizer, 1)
        found["after"] = train(models, optimizer, 2)
        found["unsent"] = [
            float(stream.residual.show(each.reducer.group.streams.scratch, "own").abs().max())
            for each in reductions
            for stream in each.reducer.group.streams.values()
            if stream.residual is not None
        ]
        found["installed"] = hooks.current() is not None
        found["patched"] = schedules.forward_backward_no_pipelining is not schedule
        found["weights"] = held(net)
        return found
    finally:
        hooks.uninstall()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "distributed-optimizer"])
def test_a_second_set_up_and_detach(sharded: bool) -> None:
    first, second = processes.run(2, _wrapped_again, sharded)
    for found in (first, second):
        for name in ("first", "second"):
            assert not any(found[name][:4]), "the start is dense"
            assert all(found[name][5:])
        assert not any(found["after"])
        assert found["unsent"]
        assert not any(found["unsent"])
        assert not found["installed"]
        assert not found["patched"]
    assert torch.equal(first["weights"], second["weights"])


def _memory_line(rank: int, world_size: int) -> list[str]:
    memory.LARGE_SHARE = -1.0  # else small models are not worth a line
    with processes.logged() as lines:
        train_all(rank, world_size, [Job(steps=1).with_dct(section())])
    return [line for line in lines if "this rank keeps" in line]


def test_the_log_says_what_a_rank_keeps() -> None:
    (line,), others = processes.run(2, _memory_line)
    assert "of residual and" in line
    assert "of displaced weights" in line
    assert others == []
