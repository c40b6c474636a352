"""``dct demo``: train a DLRM with DeepSpeed on local ranks, dense and then with DCT, and compare.

Both runs have the same data, seed and batches; all that differs is the ``dct`` section of the JSON.
"""

from __future__ import annotations

import copy
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dct_plugin.errors import DCTError
from dct_plugin.links.namespaces import LinksError, rate_fault, rate_name

from ..figures import BASELINE
from ..settings import MODEL_SECTION
from .shared import Job, check_target, chosen_format, command, complete, launch, read_json, versions, write

if TYPE_CHECKING:
    from ..speed import Measured

__all__ = ["deepspeed_config", "demo"]


@dataclass(frozen=True)
class Preset:
    """What suits a data set; options override it."""

    epochs: int
    batch_size: int


PRESETS = {"diabetes": Preset(epochs=3, batch_size=512), "criteo": Preset(epochs=1, batch_size=128)}
QUICK = Preset(epochs=1, batch_size=128)
QUICK_ROWS = 16_000

#: Rates of links that steps are measured at where that is possible, and for how long at each.
LINKS, LINK_SECONDS = ["1gbit", "100mbit"], 8.0
QUICK_LINKS, QUICK_LINK_SECONDS = ["1gbit"], 2.0

#: Data-parallel tables: all gradients cross in the all-reduce that DCT replaces.
MODEL = {"model": "dlrm", "tables": "replicated", "embedding_dim": 32, "bottom": [512], "top": [512, 256]}

#: Recommenders are usually trained with Adagrad, and error feedback does it no harm (see docs/demo.md).
OPTIMIZER = "Adagrad"
WARMUP_STEPS = 20
LEARNING_RATES = {"adagrad": 0.02, "adam": 1e-3, "adamw": 1e-3, "sgd": 0.1}

#: Optimizers of which DeepSpeed would take its fused form, which it compiles first; the rest come from torch.
_DEEPSPEED_OWN = {"adam", "adamw"}
_WITH_MOMENTUM = {"adam", "adamw", "nadam"}
#: Of ``dct.data_parallel``, with optimizers that have momentum, where the configuration does not choose.
AHEAD = {"error_feedback": "step_ahead", "warmup_steps": 10, "sparsity_warmup_steps": 20}


def demo(
    sparsity: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of gradient entries not sent (0.99 if not given)."),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the training part; if not given 3 for diabetes, 1 for criteo."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Local processes.")] = 2,
    zero_stage: Annotated[
        int | None, typer.Option(min=0, max=2, help="ZeRO stage: 0 (if not given), 1 or 2.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial weights, the batches and the test part.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="File to train on; without it Diabetes 130-US, which ships with this.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="Format of the data: criteo (if --data is given) or diabetes."),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Any optimizer of torch or DeepSpeed (Adagrad if not given).")
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per step, all ranks together.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="DeepSpeed JSON to start from; options given here override it.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the plot, the JSON files and the ranks' output.")
    ] = Path("out"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures, curves and versions to this file.")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="Rate of links, as tc writes it, at which steps are measured; may be repeated (1gbit and "
            "100mbit where network namespaces can be made), or none."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds of training, to see that it runs; not for figures.")
    ] = False,
) -> None:
    """Train a recommender on real data on two local ranks, dense and with DCT, and compare."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from dct_plugin.config import DCTConfig

    from ..figures import read_runs
    from ..report import draw_training, faults, speed_table, verdict
    from ..speed import Comparison, Cost, read_metrics

    started = time.monotonic()
    rates = _rates(link, quick=quick)
    format = chosen_format(format, data, tuple(PRESETS))
    preset = QUICK if quick else PRESETS[format]
    with_dct = deepspeed_config(
        preset,
        config,
        sparsity=sparsity,
        zero_stage=zero_stage,
        optimizer=optimizer,
        lr=lr,
        batch_size=batch_size,
        ranks=ranks,
    )
    dense = {key: value for key, value in with_dct.items() if key != "dct"}
    metrics_file = out / "dct.metrics.jsonl"
    check_target(metrics_file, "--out")
    check_target(json_file, "--json")
    metrics_file.unlink(missing_ok=True)
    with_dct["dct"]["metrics"] = {**with_dct["dct"].get("metrics", {}), "path": str(metrics_file), "every": 1}
    console = Console()
    job = Job(
        format,
        None if data is None else str(data),
        max_rows=QUICK_ROWS if quick else None,
        epochs=epochs or preset.epochs,
        seeds=[seed],
        configs={BASELINE: dense, "dct": with_dct},
        split_seed=seed,
    )
    done = launch("demo", job, ranks=ranks, folder=out, console=console)
    metrics = read_metrics(metrics_file)
    if not metrics:
        raise DCTError(
            "the DCT run wrote no metrics, so the plugin was not active in it. See `dct doctor`: is "
            f"TORCH_DEVICE_BACKEND_AUTOLOAD=0 set, or the plugin not installed for {sys.executable}?"
        )
    runs = read_runs(done.events)
    stage, method = with_dct["zero_optimization"].get("stage", 0), with_dct["optimizer"]
    comparison = Comparison(
        dense=runs[0],
        dct=runs[1],
        dense_cost=Cost.of_dense(runs[0], metrics, ranks=ranks),
        dct_cost=Cost.of_dct(metrics, density_target=DCTConfig.parse(with_dct["dct"]).data_parallel.density),
        ranks=ranks,
        zero_stage=stage,
        measured=_on_links(rates, job, ranks, out, console, quick=quick, wanted=bool(link)),
    )
    start, trained = done.events[0], comparison.dct
    of_data = f"{start['data']}: {start['training_rows']:,} training rows,"
    of_run = (
        f"{trained.weights:,} weights, {ranks} ranks, ZeRO-{stage}, {method['type']} "
        f"{method['params'].get('lr', '')}, batch {trained.batch_size}, {trained.steps} steps"
    )
    plot = out / "demo.png"
    draw_training(comparison, plot, title=f"{of_data}\n{of_run}")
    table = speed_table(comparison, title=f"{of_data} {of_run}").rich()
    console.print(Padding(table, (1, 0, 1, 0)))
    broken = faults(runs)
    for paragraph in [*verdict(comparison, quick=quick), *broken]:
        console.print(Text(paragraph), end="\n\n")
    console.print("To repeat each run by itself:")
    for line in done.command_lines.values():
        console.print(Text("  " + line), soft_wrap=True)
    files = [str(plot)]
    if json_file is not None:
        figures = {
            "command": command(),
            "data": {
                **{key: start[key] for key in ("data", "rows", "training_rows")},
                "parameters": trained.weights,
                "batch_size": trained.batch_size,
            },
            **comparison.as_dict(),
            "deepspeed_config": with_dct,
            "runs": done.command_lines,
            "versions": versions(),
            "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
            "seconds": round(time.monotonic() - started, 1),
        }
        write(json_file, figures)
        files.append(str(json_file))
    console.print(Text(f"\nWrote {' and '.join(files)} in {time.monotonic() - started:.0f} s."))
    if broken:
        raise typer.Exit(1)


def _rates(link: list[str] | None, *, quick: bool) -> list[str]:
    """Rates of the links to measure at.

    Raises:
        typer.BadParameter: One is no rate.
    """
    if not link:
        return QUICK_LINKS if quick else LINKS
    rates = [rate for rate in link if rate != "none"]
    for rate in rates:
        if fault := rate_fault(rate):
            raise typer.BadParameter(f"{fault}, or none", param_hint="--link")
    return rates


def _on_links(
    rates: list[str], job: Job, ranks: int, out: Path, console: Any, *, quick: bool, wanted: bool
) -> list[Measured]:
    """Steps on links of these rates; nothing, with a line that says why, if they cannot be measured here.

    Raises:
        LinksError: They cannot, and were ``wanted``.
    """
    from ..runner import enough_gpus
    from ..speed import measured_on

    if not rates:
        return []
    names = " and ".join(map(rate_name, rates))
    try:
        if enough_gpus(ranks):
            raise LinksError("ranks on GPUs talk past network namespaces")
        with console.status(f"measuring steps on links of {names}"):
            dct = {key: value for key, value in job.configs["dct"]["dct"].items() if key != "metrics"}
            return measured_on(
                rates,
                job.configs[BASELINE],
                {**job.configs["dct"], "dct": dct},
                ranks=ranks,
                data={"format": job.format, "data": job.data, "max_rows": job.max_rows},
                seconds=QUICK_LINK_SECONDS if quick else LINK_SECONDS,
                folder=out / "logs",
            )
    except LinksError as error:
        if wanted:
            raise
        console.print(f"Steps at {names} are computed, not measured: {error}", markup=False, soft_wrap=True)
        return []


def _remembers(optimizer: dict[str, Any]) -> bool:
    """Whether gradients work on in later steps, so that late ones cost quality (docs/quality.md)."""
    kind = str(optimizer.get("type")).lower()
    return kind in _WITH_MOMENTUM or bool(optimizer.get("params", {}).get("momentum"))


def deepspeed_config(
    preset: Preset,
    file: Path | None,
    *,
    sparsity: float | None,
    zero_stage: int | None,
    optimizer: str | None,
    lr: float | None,
    batch_size: int | None,
    ranks: int,
) -> dict[str, Any]:
    """The DeepSpeed JSON of the DCT run: ``file``, or the preset, with the options that were given.

    Raises:
        ConfigError: The file is no JSON object, the ``dct`` section is wrong, or the batch cannot be split.
    """
    from dct_plugin.config import DCTConfig

    content: dict[str, Any] = {} if file is None else read_json(file)
    source = "--batch-size" if batch_size is not None else "the configuration" if file is None else str(file)
    if batch_size is not None:
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            content.pop(key, None)
        content["train_batch_size"] = batch_size
    ours = optimizer is not None or "optimizer" not in content
    if optimizer is not None:
        content["optimizer"] = {"type": optimizer}
    content = complete(
        content, optimizer={"type": OPTIMIZER}, batch_size=preset.batch_size, ranks=ranks, source=source
    )
    section = content["optimizer"]
    kind = str(section.get("type")).lower()
    parameters = section.setdefault("params", {})
    if lr is not None:
        parameters["lr"] = lr
    elif kind in LEARNING_RATES:
        parameters.setdefault("lr", LEARNING_RATES[kind])
    if kind in _DEEPSPEED_OWN:
        parameters.setdefault("torch_adam", True)
    if ours and "lr" in parameters:
        # Adagrad's first steps are as long as the learning rate: without this they throw the model far off.
        warmup = {"warmup_min_lr": 0, "warmup_max_lr": parameters["lr"], "warmup_num_steps": WARMUP_STEPS}
        content["scheduler"] = {"type": "WarmupLR", "params": {**warmup, "warmup_type": "linear"}}
    if zero_stage is not None:
        content["zero_optimization"]["stage"] = zero_stage
    content[MODEL_SECTION] = copy.deepcopy(MODEL)

    dct = DCTConfig.parse(content.get("dct", {})).updated({"enabled": True})
    if _remembers(section) and "data_parallel" not in content.get("dct", {}):
        dct = dct.updated({"data_parallel": AHEAD})
    if sparsity is not None:
        dct = dct.updated({"data_parallel": {"sparsity": sparsity}})
    content["dct"] = dct.model_dump(mode="json", exclude_defaults=True)
    content["dct"].setdefault("data_parallel", {})["sparsity"] = dct.data_parallel.sparsity
    return content
