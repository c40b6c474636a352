"""The hooks in the real megatron-core, on CPU with gloo: a small GPT in every topology.

One launch per topology runs Megatron alone, the hooks at sparsity 0 (everything through the codec: losses and
parameters must be bitwise the same), and the hooks at work (losses must fall).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes
from support.megatron_gpt import Job, Outcome, Training, counting, freeze_linears, train, train_all

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

OFF = {"enabled": False}


def section(
    pipeline: float | None = None, tensor: float | None = None, data: float | None = None, **options: Any
) -> dict[str, Any]:
    """A ``dct`` section that switches on what is given; lossless values where the sparsity is 0."""
    parts: dict[str, Any] = {}
    for name, sparsity in (("pipeline", pipeline), ("tensor", tensor)):
        if sparsity is not None:
            forward = {"method": "threshold", "sparsity": sparsity}
            parts[name] = {"forward": forward if sparsity else {**forward, "value_dtype": "fp32"}, **options}
    result: dict[str, Any] = {"model_parallel": parts, "data_parallel": OFF}
    if data is not None:
        result["data_parallel"] = {"sparsity": data, "min_numel": 256}
        result["data_parallel"]["value_dtype"] = "bf16" if data else "fp32"
    return result


def run(world_size: int, *jobs: Job) -> list[list[Outcome]]:
    """Outcomes by job, then rank."""
    by_rank = processes.run(world_size, train_all, list(jobs))
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def losses(outcomes: list[Outcome]) -> list[float]:
    return next(outcome.losses for outcome in outcomes if outcome.losses)


def assert_same(plain: list[Outcome], hooked: list[Outcome], hooks: set[str]) -> None:
    """Bitwise the same training, and the hooks did run."""
    assert losses(plain) == losses(hooked)
    for ours, theirs in zip(hooked, plain, strict=True):
        assert ours.losses == theirs.losses
        assert ours.evaluations == theirs.evaluations
        assert ours.parameters == theirs.parameters
        assert hooks <= set(ours.active)
    assert any(outcome.classes for outcome in hooked)


def assert_learns(outcomes: list[Outcome], by: float = 0.3) -> None:
    values = losses(outcomes)
    assert values[-1] < values[0] - by, values


def ratio(outcomes: list[Outcome], cls: str) -> float:
    """Dense over sent bytes of a class, all ranks together."""
    parts = [outcome.classes[cls] for outcome in outcomes if cls in outcome.classes]
    return sum(p["dense_bytes"] for p in parts) / sum(p["sent_bytes"] for p in parts)


def test_the_public_functions_are_loaded_when_they_are_asked_for() -> None:
    code = """if True:
        import sys
        import dct_plugin.integrations.megatron as megatron
        assert not {"torch", "megatron", "megatron.core"} & set(sys.modules)
        from dct_plugin.integrations.megatron import install, uninstall
        for name in megatron.__all__:
            assert callable(getattr(megatron, name)), name
        assert install.__module__ == "dct_plugin.integrations.megatron.hooks"
        assert "megatron.core" not in sys.modules
        try:
            megatron.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pipeline_1f1b() -> None:
    job = Job(micro_batches=2, lr=2e-3, pp=2, evaluate=True)
    plain, same, left, sparse, unlike, recomputed, bf16, bf16_same = run(
        2,
        job,
        job.with_dct(section(pipeline=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.5, boundary_sparsity=[0.0])),
        job.with_dct(section(pipeline=0.9), steps=6),
        job.with_dct(section(pipeline=0.9, evaluation=False, warmup_steps=2), steps=6),
        job.with_dct(section(pipeline=0.9), steps=6, recompute="full"),
        job.with_dct(None, bf16=True),
        job.with_dct(section(pipeline=0.0), through_codec=True, bf16=True),
    )
    assert_same(plain, same, {"pipeline"})
    assert losses(left) == losses(plain)  # a boundary of sparsity 0 is left to Megatron
    assert not any(outcome.classes for outcome in left)
    assert_same(bf16, bf16_same, {"pipeline"})
    for outcomes in (sparse, unlike, recomputed):
        assert_learns(outcomes)
    assert losses(recomputed) == losses(sparse)
    assert ratio(sparse, "pipeline") >= 8
    assert ratio(sparse, "pipeline_gradient") >= 20
    assert "pipeline_evaluation" in sparse[0].classes
    assert "pipeline_evaluation" not in unlike[0].classes
    assert losses(unlike)[:2] == losses(plain)[:2]  # warm-up
    assert losses(unlike)[3] != losses(plain)[3]


def test_pipeline_interleaved_with_overlap() -> None:
    job = Job(micro_batches=2, lr=2e-3, pp=2, vpp=2, layers=4, overlap_p2p=True, evaluate=True)
    plain, same, sparse = run(
        2,
        job,
        job.with_dct(section(pipeline=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.75), steps=6),
    )
    assert_same(plain, same, {"pipeline"})
    assert_learns(sparse)


def test_pipeline_interleaved_four_stages() -> None:
    job = Job(pp=4, vpp=2, layers=8, lr=2e-3, steps=3)
    plain, same, sparse = run(
        4,
        job,
        job.with_dct(section(pipeline=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.9, boundary_sparsity=[0.0, 0.5]), steps=6),
    )
    assert_same(plain, same, {"pipeline"})
    assert_learns(sparse)
    # The first boundary is left to Megatron, the second is half dense, the others follow the common value.
    sent = [outcome.classes["pipeline"]["density_target"] for outcome in sparse]
    assert sent == [None, pytest.approx(0.5), pytest.approx(0.1), pytest.approx(0.1)]


def test_data_parallel() -> None:
    job = Job(micro_batches=2, lr=4e-3)
    plain, same, sparse, overlapped, bf16, bf16_overlapped = run(
        2,
        job,
        job.with_dct(section(data=0.0), through_codec=True),
        job.with_dct(section(data=0.9), steps=4),
        job.with_dct(section(data=0.9), steps=4, overlap_grad_reduce=True),
        job.with_dct(section(data=0.9), steps=4, bf16=True),
        job.with_dct(section(data=0.9), steps=4, bf16=True, overlap_grad_reduce=True),
    )
    assert_same(plain, same, {"data_parallel"})
    for outcomes in (sparse, overlapped, bf16, bf16_overlapped):
        assert_learns(outcomes)
        assert outcomes[0].parameters == outcomes[1].parameters
        assert ratio(outcomes, "gradient") > 10
    assert losses(overlapped) == losses(sparse)
    assert losses(bf16_overlapped) == losses(bf16)
    for one, other in ((overlapped, sparse), (bf16_overlapped, bf16)):
        assert one[0].parameters == other[0].parameters


def test_all_entries_in_int8() -> None:
    """They are not left to Megatron, whether they are written or chosen for a short run."""
    job = Job(layers=1, micro_batches=2, steps=2)
    written = {"sparsity": 0, "value_dtype": "int8", "min_numel": 256}
    chosen = {"total_steps": 2, "quality": None, "min_numel": 256}
    for outcomes in run(2, *(replace(job, dct={"data_parallel": data}) for data in (written, chosen))):
        assert ratio(outcomes, "gradient") > 3


def test_distributed_optimizer() -> None:
    job = Job(micro_batches=2, lr=4e-3, distributed_optimizer=True)
    plain, same, overlap, overlap_same, sparse, bf16 = run(
        2,
        job,
        job.with_dct(section(data=0.0), through_codec=True),
        job.with_dct(None, overlap_grad_reduce=True),
        job.with_dct(section(data=0.0), through_codec=True, overlap_grad_reduce=True),
        job.with_dct(section(data=0.9), steps=4, overlap_grad_reduce=True),
        job.with_dct(section(data=0.9), steps=4, bf16=True),
    )
    assert_same(plain, same, {"data_parallel"})
    assert_same(overlap, overlap_same, {"data_parallel"})
    for outcomes in (sparse, bf16):
        assert_learns(outcomes)
        assert ratio(outcomes, "gradient") > 10


def test_fp16_overflow_is_rolled_back() -> None:
    """Megatron skips steps until its loss scale fits; residuals are then what they were, in the new unit."""
    # The scale doubles after every second good step, until one overflows again.
    job = Job(
        micro_batches=2, lr=2e-3, fp16=True, loss_scale=2.0**20, loss_scale_window=2, steps=14, watch=True
    )
    late = section(data=0.9)
    late["data_parallel"]["warmup_steps"] = 4
    sparse, sharded, warm = run(
        2,
        job.with_dct(section(data=0.9)),
        job.with_dct(section(data=0.9), distributed_optimizer=True),
        job.with_dct(late, steps=8),
    )
    for outcomes in (sparse, sharded):
        assert_learns(outcomes, by=0.2)
        assert torch.tensor(losses(outcomes)).isfinite().all()
        assert outcomes[0].skipped > 1
    for outcome in (*sparse, *sharded):
        overflows = 0
        for (_, scale, before), (success, new_scale, after) in itertools.pairwise(outcome.history):
            old, new = _streams(before), _streams(after)
            if success or not any(part["residual"].any() for part in old.values()):
                continue
            overflows += 1
            assert new_scale == scale / 2
            for name, part in old.items():
                assert torch.equal(new[name]["residual"], part["residual"] / 2), name
                halved = {**part["threshold"], "tau": part["threshold"]["tau"] / 2}
                assert new[name]["threshold"] == halved, name
        assert overflows
    # The first residuals after warm-up are in the loss scale's unit from the start.
    sizes = [
        max((float(part["residual"].abs().max()) for part in _streams(state).values()), default=0.0) / scale
        for _, scale, state in warm[0].history
    ]
    assert not any(sizes[:4])
    assert any(sizes)
    assert max(sizes) < 1


def reject(training: Training, step: int) -> None:
    """Before two of the steps run a batch whose gradients are cleared without a step."""
    if step in (3, 5):
        training.run(training.streams(counting))
        training.clear()
        training.keep(False)


def test_a_batch_that_the_script_rejects_leaves_no_trace() -> None:
    keys = {"sparsity": 0.9, "min_numel": 256, "warmup_steps": 1, "sparsity_warmup_steps": 0}
    job = Job(micro_batches=1, steps=7, before_step=reject, watch=True)
    ahead = replace(job, dct={"data_parallel": keys}, distributed_optimizer=True, overlap_grad_reduce=True)
    told = []
    for outcomes in run(2, job.with_dct({"data_parallel": keys}), ahead):
        told.append(sum("without optimizer.step()" in line for line in outcomes[0].log))
        for outcome in outcomes:
            states = [_streams(state) for _, _, state in outcome.history]
            first, second = (at for at, (is_step, *_) in enumerate(outcome.history) if not is_step)
            assert all(part["residual"].any() for part in states[first - 1].values())
            assert not any(part["residual"].any() for part in states[first].values())
            for name, part in states[second - 1].items():
                assert part["residual"].any(), name
                assert torch.equal(states[second][name]["residual"], part["residual"]), name
                assert states[second][name]["threshold"] == part["threshold"], name
    assert told == [1, 0]  # said once


def test_dense_steps_are_the_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    dct = section(data=0.9)
    dct["data_parallel"] |= {"feedback": "local", "warmup_steps": 3, "sparsity_warmup_steps": 0}
    run(2, Job(micro_batches=1, steps=5).with_dct({**dct, "metrics": {"path": str(path), "every": 2}}))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    starts = {(row["step"], row["is_start"]) for row in rows if "class" in row}
    assert starts == {(2, True), (3, True), (5, False)}


def _streams(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Streams of the gradients that have a residual."""
    reducers = state["reducers"]
    streams = reducers["dense"]["state"]["streams"] if reducers else {}
    return {name: part for name, part in streams.items() if part["residual"] is not None}


def test_checkpoints_keep_residuals_and_thresholds(tmp_path: Path) -> None:
    """Saved half-way and loaded by new processes: bitwise the training that was not interrupted."""
    data = Job(micro_batches=2, lr=4e-3, distributed_optimizer=True, steps=4).with_dct(section(data=0.9))
    stages = Job(micro_batches=2, lr=4e-3, pp=2, steps=4).with_dct(section(pipeline=0.9))
    saved = [(str(tmp_path / "data"), 2), (str(tmp_path / "stages"), 2)]
    whole = run(2, *(replace(job, save=where) for job, where in zip((data, stages), saved, strict=True)))
    resumed = run(2, *(replace(job, load=where) for job, where in zip((data, stages), saved, strict=True)))
    for one, other in zip(whole, resumed, strict=True):
        assert losses(one)[2:] == losses(other)
        assert [o.parameters for o in one] == [o.parameters for o in other]


def test_experts_are_left_alone_unless_asked() -> None:
    job = Job(micro_batches=2, lr=2e-3, layers=2, experts=2, ep=2, steps=3, distributed_optimizer=True)
    asked, asked_sparse = section(data=0.0), section(data=0.9)
    asked["model_parallel"]["expert_gradients"] = asked_sparse["model_parallel"]["expert_gradients"] = True
    plain, same, sparse, all_sparse = run(
        4,
        job,
        job.with_dct(asked, through_codec=True, watch=True),
        job.with_dct(section(data=0.9), watch=True),
        job.with_dct(asked_sparse, steps=6, watch=True),
    )
    # Four ranks' gradients are added up in another order than gloo's: equal but for rounding.
    assert losses(same) == pytest.approx(losses(plain), rel=1e-5)
    assert_learns(all_sparse)
    assert set(same[0].history[-1][2]["reducers"]) == {"dense", "expert"}
    assert set(sparse[0].history[-1][2]["reducers"]) == {"dense"}
    assert set(all_sparse[0].history[-1][2]["reducers"]) == {"dense", "expert"}
    left = "uncompressed/gradient/experts"
    assert left in sparse[0].classes
    assert left not in all_sparse[0].classes
    assert any(
        line.endswith("experts (dct.model_parallel.expert_gradients is off)") for line in sparse[0].log
    )
    told = [next(line for line in some[0].log if "active: " in line) for some in (sparse, all_sparse)]
    (some_active, some_all), (active, whole) = (re.findall(r"\d+", line) for line in told)
    assert int(some_active) < int(active) == int(whole) == int(some_all)
    assert all_sparse[0].classes["gradient"]["steps"] == 6  # not once for each of the two reducers


def test_tensor_parallel() -> None:
    job = Job(micro_batches=2, lr=4e-3, tp=2, layers=4)
    plain, same, sparse, skipping, skipping_all = run(
        2,
        job,
        job.with_dct(section(tensor=0.0), through_codec=True),
        job.with_dct(section(tensor=0.9), steps=4),
        job.with_dct(section(tensor=0.9, skip_first_layers=1, skip_last_layers=2)),
        job.with_dct(section(tensor=0.9, skip_first_layers=2, skip_last_layers=2)),
    )
    assert_same(plain, same, {"tensor"})
    assert_learns(sparse)
    assert losses(skipping_all) == losses(plain)
    assert "tensor" not in skipping_all[0].classes
    once, whole = skipping[0].classes["tensor"], same[0].classes["tensor"]
    assert 4 * once["dense_bytes"] == whole["dense_bytes"]
    assert ratio(sparse, "tensor") > 8


def test_tensor_and_sequence_parallel() -> None:
    job = Job(micro_batches=2, lr=4e-3, tp=2, sequence_parallel=True)
    plain, same, sparse, gathered, recomputed = run(
        2,
        job,
        job.with_dct(section(tensor=0.0, gather=True), through_codec=True),
        job.with_dct(section(tensor=0.9), steps=4),
        job.with_dct(section(tensor=0.9, gather=True), steps=4),
        job.with_dct(section(tensor=0.9), steps=4, recompute="full"),
    )
    assert_same(plain, same, {"tensor"})
    assert_learns(sparse)
    assert_learns(gathered)
    assert losses(recomputed) == losses(sparse)
    assert ratio(sparse, "tensor") > 8
    assert ratio(sparse, "tensor_gradient") > 12


def call_by_position(chunk: torch.nn.Module, config: Any) -> None:
    """Give the functions of parallel linears their arguments by position."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for linear in (ColumnParallelLinear, RowParallelLinear):
        linear._forward_impl = _by_position


def _by_position(linear: Any, input: Any, weight: Any, **given: Any) -> torch.Tensor:
    """Do what ``_forward_impl`` of parallel linears does."""
    from megatron.core.tensor_parallel import layers

    function = (
        layers.linear_with_grad_accumulation_and_async_allreduce
        if weight.requires_grad
        else layers.linear_with_frozen_weight
    )
    _, _, *others = inspect.signature(function).parameters
    return function(input, weight, *(given.get(name) for name in others))


def adapt(chunk: Any, config: Any) -> None:
    """Freeze all parameters, and give row-parallel linears LoRA adapters; one half is row-parallel, too."""
    from megatron.core.tensor_parallel import RowParallelLinear

    chunk.requires_grad_(False)
    for number, linear in enumerate([m for m in chunk.decoder.modules() if isinstance(m, RowParallelLinear)]):
        generator = torch.Generator().manual_seed(123 + number)
        down = _row_parallel(linear.input_size, 8, config)
        up = torch.nn.Linear(8, linear.output_size, bias=False)
        for part in (down, up):
            part.weight.data.copy_(0.1 * torch.randn(part.weight.shape, generator=generator))
        up.weight.sequence_parallel = config.sequence_parallel
        linear.adapter = torch.nn.ModuleList([down, up])
        linear.register_forward_hook(_add_adapter)


def _add_adapter(linear: Any, arguments: Any, output: Any) -> Any:
    down, up = linear.adapter
    return output[0] + up(down(arguments[0])[0]), *output[1:]


def unfreeze(training: Training, step: int) -> None:
    """Train all parameters from step 2 on, without wrapping the model anew."""
    if step == 1:
        for model in training.models:
            model.module.requires_grad_(True)


def _row_parallel(inputs: int, outputs: int, config: Any) -> Any:
    from megatron.core.tensor_parallel import RowParallelLinear

    return RowParallelLinear(
        inputs, outputs, config=config, init_method=torch.nn.init.zeros_, bias=False, input_is_parallel=True,
        skip_bias_add=False,
    )  # fmt: skip


def add_mamba_layer(chunk: Any, config: Any) -> None:
    """Put Megatron's Mamba layer behind the transformer layers. Its mixer needs CUDA: a stub has the parallel
    linears without what they mix.
    """
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
    layer = MambaLayer(config, parts, layer_number=config.num_layers, pg_collection=groups)
    chunk.decoder.register_forward_hook(lambda module, arguments, output: layer(output))


def add_linear(chunk: Any, config: Any) -> None:
    """Put a parallel linear behind the transformer layers."""
    linear = _row_parallel(config.hidden_size, config.hidden_size, config)

    def forward(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        part = output[..., : linear.weight.shape[1]]
        if config.sequence_parallel:
            part = part.repeat(config.tensor_model_parallel_size, 1, 1)
        return output + linear(part.contiguous())[0]

    chunk.decoder.register_forward_hook(forward)


def test_linears_that_are_frozen_called_by_position_or_outside_of_layers() -> None:
    """They are compressed alike, or counted."""
    job = Job(micro_batches=2, lr=2e-3, tp=2, sequence_parallel=True, steps=2)
    gathered = job.with_dct(section(tensor=0.5, gather=True))
    found, by_position, plain, frozen, frozen_found, outside, mamba, alone = run(
        2,
        gathered,
        replace(gathered, prepare=call_by_position),
        replace(job, prepare=freeze_linears),
        replace(job.with_dct(section(tensor=0.0, gather=True), through_codec=True), prepare=freeze_linears),
        replace(gathered, prepare=freeze_linears),
        replace(gathered, prepare=add_linear),
        replace(gathered, prepare=add_mamba_layer),
        job.with_dct(section(tensor=0.5), sequence_parallel=False),
    )
    for ours, same in zip(found, by_position, strict=True):
        assert ours.losses == same.losses
        assert ours.classes["tensor"]["sent_bytes"] == same.classes["tensor"]["sent_bytes"]
    assert_same(plain, frozen, {"tensor"})
    assert frozen_found[0].classes["tensor"]["dense_bytes"] == found[0].classes["tensor"]["dense_bytes"]

    def reasons(outcome: Outcome) -> set[str]:
        return {name.rpartition("/")[2] for name in outcome.classes if name.startswith("uncompressed/tensor")}

    # The language model's head is a parallel linear outside of the layers, and its input is gathered.
    assert reasons(found[0]) == {"other_layers", "other_tensors", "input_gradients"}
    assert reasons(alone[0]) == {"other_tensors", "input_gradients"}
    more = outside[0].classes["uncompressed/tensor/other_layers"]["sent_bytes"]
    assert more > found[0].classes["uncompressed/tensor/other_layers"]["sent_bytes"]
    told = [
        next(line for line in some[0].log if "active: " in line) for some in (found, outside, mamba, alone)
    ]
    assert [line.partition("active: ")[2] for line in told] == [
        "tensor on 8 of 9 parallel linear layers",
        "tensor on 8 of 10 parallel linear layers",
        "tensor on 8 of 11 parallel linear layers",  # a stub of Mamba's mixer, with two of them
        "tensor on 4 of 9 parallel linear layers",
    ]
    for outcomes in (found, outside, mamba, alone):
        (line,) = (line for line in outcomes[0].log if "% of tensor-parallel bytes went uncompressed" in line)
        assert "gradients of the inputs of column-parallel layers" in line
        assert not any("uncompressed" in line for line in outcomes[1].log)


def test_adapters_of_frozen_layers() -> None:
    """LoRA: the gradients of the adapters alone, and the activations of both, are compressed."""
    sharded = Job(micro_batches=2, lr=4e-3, tp=2, sequence_parallel=True, prepare=adapt)
    job = Job(micro_batches=2, lr=4e-3, distributed_optimizer=True, prepare=adapt)
    plain, same, sparse, data_plain, data_same, data_sparse, unfrozen = run(
        2,
        sharded,
        sharded.with_dct(section(tensor=0.0, gather=True), through_codec=True),
        sharded.with_dct(section(tensor=0.9, gather=True)),
        job,
        job.with_dct(section(data=0.0), through_codec=True),
        job.with_dct(section(data=0.9), steps=4),
        job.with_dct(section(data=0.9), steps=3, after_step=unfreeze),
    )
    assert_same(plain, same, {"tensor"})
    assert_same(data_plain, data_same, {"data_parallel"})
    assert ratio(sparse, "tensor") > 6
    assert ratio(data_sparse, "gradient") > 8
    assert data_sparse[0].parameters == data_sparse[1].parameters
    assert any("tensor on 12 of 13 parallel linear layers" in line for line in sparse[0].log)
    (line,) = (line for line in unfrozen[0].log if "unfrozen during the training" in line)
    assert "Megatron's DistributedDataParallel has no buckets for them" in line
    assert not any("unfrozen" in line for line in unfrozen[1].log + data_sparse[0].log)


def test_pipeline_with_data_parallel() -> None:
    job = Job(micro_batches=2, lr=4e-3, pp=2, distributed_optimizer=True)
    plain, same, sparse = run(
        4,
        job,
        job.with_dct(section(pipeline=0.0, data=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.9, data=0.9), steps=4),
    )
    assert_same(plain, same, {"pipeline", "data_parallel"})
    assert_learns(sparse)
    assert all("uncompressed/gradient/shared_weights" in outcome.classes for outcome in sparse)


def test_tensor_with_pipeline_parallel() -> None:
    job = Job(micro_batches=2, lr=4e-3, tp=2, pp=2, sequence_parallel=True, steps=2)
    plain, same, sparse = run(
        4,
        job,
        job.with_dct(section(pipeline=0.0, tensor=0.0), through_codec=True),
        job.with_dct(section(pipeline=0.75, tensor=0.75), steps=4),
    )
    assert_same(plain, same, {"pipeline", "tensor"})
    assert_learns(sparse, by=0.2)


def _newer(config: Any, ddp: Any) -> dict[str, Callable[[], Any]]:
    """Return what megatron-core has from 0.19 on. For an earlier one a name stands for its configuration, and
    a stub for version 2 of Megatron-FSDP.
    """
    from types import SimpleNamespace

    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer import TransformerConfig

    from dct_plugin.integrations.host.refusals import refuse_features

    number, found = "tensor_parallel_num_weight_shards", dict[str, Callable[[], Any]]()
    for prefix, key in (("gtp", number), ("expert gtp", f"expert_{number}")):
        if number in {field.name for field in fields(TransformerConfig)}:
            sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 2}
            sharded: Any = TransformerConfig(**sizes, **{key: 2})
            whole: Any = TransformerConfig(**sizes)
        else:
            remat = key.replace("tensor_parallel_num_weight_shards", "gtp_weight_remat_size")
            sharded = SimpleNamespace(**vars(config), **{remat: 2})
            whole = SimpleNamespace(**vars(config), **{remat: 1})
        refuse_features("dct.data_parallel", whole)
        linear = torch.nn.Linear(2, 2)
        found[prefix] = functools.partial(DistributedDataParallel, sharded, ddp, linear)
        found[f"{prefix} layer"] = functools.partial(refuse_features, "dct.model_parallel.tensor", sharded)
    place = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental"
    if importlib.util.find_spec(place) is None:
        first = importlib.import_module(place.rpartition(".")[0])
        first.__path__.append(str(Path(__file__).parents[1] / "support" / "megatron_fsdp_2"))
    second = importlib.import_module(place)
    found["megatron fsdp 2"] = lambda: second.fully_shard(torch.nn.Linear(2, 2), None, None)
    return found


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    from support import megatron_cpu

    megatron_cpu.install()
    from types import SimpleNamespace

    from dct_plugin.config import DCTConfig
    from dct_plugin.errors import DCTError
    from dct_plugin.integrations.host.refusals import refuse_features
    from dct_plugin.integrations.megatron import buckets, hooks, pipeline

    found_early: dict[str, str] = {}
    config = SimpleNamespace(pipeline_dtype=torch.float32, num_layers=2)
    cases = {
        "variable": lambda: pipeline._check(SimpleNamespace(**vars(config), variable_seq_lengths=True)),
        "ring": lambda: pipeline._check(SimpleNamespace(**vars(config), use_ring_exchange_p2p=True)),
        "dtype": lambda: pipeline._check(SimpleNamespace(pipeline_dtype=torch.float64)),
    }

    def refused_by_tensor(**settings: Any) -> None:
        refuse_features("dct.model_parallel.tensor", SimpleNamespace(**vars(config), **settings), "layer 2")

    cases["fp8"] = lambda: refused_by_tensor(fp8="hybrid")
    cases["recipe"] = lambda: refused_by_tensor(quant_recipe="recipe")
    cases["overlap"] = lambda: refused_by_tensor(tp_comm_overlap=True)
    hooks.install(DCTConfig.parse(section(data=0.9)))
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    ddp = DistributedDataParallelConfig()
    two, four = (SimpleNamespace(size=lambda size=size: size) for size in (2, 4))
    nodes = DCTConfig.parse({"data_parallel": {"nodes": 2}}).data_parallel
    for name, case in {
        "torch fsdp": lambda: TorchFullyShardedDataParallel(config, ddp, torch.nn.Linear(2, 2)),
        "instances": lambda: buckets.nodes_in(nodes, four, two),
        "megatron fsdp": lambda: FullyShardedDataParallel(config, ddp, torch.nn.Linear(2, 2)),
    }.items():
        with pytest.raises(DCTError) as refusal:
            case()
        found_early[name] = str(refusal.value)
    for name, case in _newer(config, ddp).items():
        with pytest.raises(DCTError) as refusal:
            case()
        found_early[name] = str(refusal.value)
    hooks.uninstall()
    cases["graphs"] = lambda: refused_by_tensor(cuda_graph_impl="local")
    found = found_early
    for name, case in cases.items():
        try:
            case()
        except DCTError as error:
            found[name] = str(error)
    first = DCTConfig.parse(section(pipeline=0.5))
    assert list(hooks.install(first)) == ["pipeline"]
    assert list(hooks.install(first)) == ["pipeline"]
    try:
        hooks.install(DCTConfig.parse(section(pipeline=0.6)))
    except DCTError as error:
        found["twice"] = str(error)
    hooks.uninstall()
    assert hooks.current() is None
    assert hooks.install(DCTConfig(enabled=False)) == {}
    hooks.uninstall()
    return found


def test_what_cannot_work_is_refused_by_name() -> None:
    (found,) = processes.run(1, _refusals)
    assert "variable_seq_lengths" in found["variable"]
    assert "use_ring_exchange_p2p" in found["ring"]
    assert "float64" in found["dtype"]
    assert (
        "layer 2: does not work with Megatron's fp8 = hybrid: products in fp8 (--fp8-format)" in found["fp8"]
    )
    assert "--te-precision-config-file" in found["recipe"]
    assert "--tp-comm-overlap" in found["overlap"]
    assert "CUDA graphs" in found["graphs"]
    assert "another configuration" in found["twice"]
    assert "num_distributed_optimizer_instances = 2 the instances are the nodes" in found["instances"]
    assert "TorchFullyShardedDataParallel" in found["torch fsdp"]
    assert "FullyShardedDataParallel (megatron.core.distributed.fsdp" in found["megatron fsdp"]
    assert "FsdpModule (megatron.core.distributed.fsdp" in found["megatron fsdp 2"]
    for name in ("gtp", "gtp layer", "expert gtp", "expert gtp layer"):
        assert "gtp_weight_remat_size = 2: generalised tensor parallelism" in found[name]
        assert ("(expert_tensor_parallel_num" in found[name]) == ("expert" in name)


def _outside_iterations(rank: int, world_size: int) -> str:
    from dct_plugin.errors import DCTError
    from dct_plugin.integrations.megatron import hooks
    from dct_plugin.integrations.megatron.data import DataParallelHook

    def reduce(training: Training, step: int) -> None:
        hooks.state_dict()  # the iteration ends
        (hook,) = (hook for hook in hooks.current().hooks if isinstance(hook, DataParallelHook))
        for model in hook.models:
            model.finish_grad_sync()

    torch.set_num_threads(1)
    with pytest.raises(DCTError) as raised:
        train(Job(layers=1, micro_batches=1, steps=1, after_step=reduce).with_dct(section(data=0.9)))
    return str(raised.value)


def test_gradients_outside_iterations_are_refused() -> None:
    """A loop of its own would stay in the dense start, or lose what waits."""
    for text in processes.run(2, _outside_iterations):
        assert "get_forward_backward_func" in text


def _identities(rank: int, world_size: int) -> tuple[int, int]:
    """How many groups and layers got the id of one that was gone."""
    import weakref
    from types import SimpleNamespace

    import torch.distributed as dist
    from support import megatron_cpu

    megatron_cpu.install()
    from megatron.core.tensor_parallel import layers

    from dct_plugin.config import DCTConfig
    from dct_plugin.integrations.megatron import hooks, tensor

    hooks.install(DCTConfig.parse(section(tensor=0.9)))
    (hook,) = (hook for hook in hooks.current().hooks if isinstance(hook, tensor.TensorHook))
    hook._current = tensor._Site("layer 1 linear", dense=False, sums=True)
    seen: set[int] = set()
    reused_groups = 0
    for _ in range(8):
        group = dist.new_group([0, 1])
        reused_groups += id(group) in seen
        seen.add(id(group))
        collectives, _ = hook._route(group, torch.device("cpu"))
        assert collectives.exchange.peers.group is group
        dist.destroy_process_group(group)
        del group

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = layers.RowParallelLinear.__new__(layers.RowParallelLinear)
            torch.nn.Module.__init__(self.linear)
            self.layer_number, self.config = 1, SimpleNamespace(num_layers=1)

    forward = functools.partial(hook._layer_forward, lambda layer: layer.linear)
    seen.clear()
    reused_layers = 0
    for _ in range(50):
        layer = Layer()
        reused_layers += id(layer) in seen
        seen.add(id(layer))
        assert getattr(forward(layer), tensor._SITE, None) is not None
        gone = weakref.ref(layer)
        del layer
        assert gone() is None  # the hook does not keep a model that is thrown away
    hooks.uninstall()
    return reused_groups, reused_layers


def test_the_id_of_what_is_gone_may_be_given_again() -> None:
    """A later group has collectives of its own, and a layer of a later model is hooked, too."""
    for _, reused_layers in processes.run(2, _identities):
        assert reused_layers  # otherwise nothing was tested


def test_gradients_outside_their_bucket_are_copied_there_first() -> None:
    """megatron-core 0.17 accumulates some gradients in fp32 beside a bf16 bucket."""
    from types import SimpleNamespace

    from dct_plugin.integrations.megatron.buckets import NAME, fill_buffers, gradients_in

    data = torch.zeros(12, dtype=torch.bfloat16)
    beside = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    beside.main_grad = torch.arange(8, dtype=torch.float32)
    beside.main_grad_copy_in_grad_buffer = data[4:]
    inside = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    inside.main_grad = data[:4]
    bucket = SimpleNamespace(
        grad_data=data, params_list=[inside, beside], params_with_extra_main_grads=[beside]
    )
    for parameter in bucket.params_list:
        setattr(parameter, NAME, "weight")
    fill_buffers(SimpleNamespace(buckets=[bucket]))
    assert data.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert [(found.start, found.view.numel()) for found in gradients_in(bucket)] == [(0, 4), (4, 8)]


def _monitored(rank: int, world_size: int, folder: str) -> str:
    import contextlib
    import io
    import sys
    from types import ModuleType, SimpleNamespace

    from torch.utils.tensorboard import SummaryWriter

    # megatron.training is in no wheel: two of its global variables are all that the hooks look at.
    module: Any = ModuleType("megatron.training.global_vars")
    module._GLOBAL_ARGS = SimpleNamespace(log_interval=2)
    module._GLOBAL_TENSORBOARD_WRITER = SummaryWriter(folder) if rank == world_size - 1 else None
    sys.modules["megatron.training"] = ModuleType("megatron.training")
    sys.modules[module.__name__] = module
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            train_all(rank, world_size, [Job(pp=2, steps=5, dct=section(pipeline=0.9))])
        if rank == world_size - 1:
            module._GLOBAL_TENSORBOARD_WRITER.close()
    finally:
        del sys.modules[module.__name__], sys.modules["megatron.training"]
    return output.getvalue()


def test_metrics_reach_tensorboard_and_the_log(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first, last = processes.run(2, _monitored, str(tmp_path))
    lines = [line for line in last.splitlines() if line.startswith(" dct iteration")]
    assert [int(line.split()[2]) for line in lines] == [2, 4, 5]  # Megatron's --log-interval, and the rest
    assert all("pipeline_gradient: " in line for line in lines)  # what the last stage sends
    assert " dct iteration" not in first
    assert first.count("dct: 5 steps, rank 0 sent") == 1
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    for name in ("sent_bytes", "dense_bytes", "ratio", "density", "exchange_ms"):
        assert [event.step for event in events.Scalars(f"dct/pipeline_gradient/{name}")] == [2, 4, 5]
    assert events.Scalars("dct/pipeline_gradient/ratio")[-1].value > 15
