"""``dct demo``: train a DLRM with DeepSpeed on local ranks, dense and then with DCT, and compare.

Both runs are the same script, data, seeds and batches; all that differs is the ``dct`` section of the JSON.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import shlex
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dct_plugin import __version__
from dct_plugin.errors import ConfigError, DCTError

if TYPE_CHECKING:
    from .report import Comparison
    from .runner import Runner

__all__ = ["deepspeed_config", "demo"]


@dataclass(frozen=True)
class Preset:
    """What suits a data set; options override it."""

    epochs: int
    batch_size: int


PRESETS = {"diabetes": Preset(epochs=3, batch_size=512), "criteo": Preset(epochs=1, batch_size=128)}
QUICK = Preset(epochs=1, batch_size=128)
QUICK_ROWS = 16_000

#: Recommenders are usually trained with Adagrad, and error feedback does it no harm (see docs/demo.md).
OPTIMIZER = "Adagrad"
WARMUP_STEPS = 20
LEARNING_RATES = {"adagrad": 0.02, "adam": 1e-3, "adamw": 1e-3, "sgd": 0.1}

#: Optimizers of which DeepSpeed would take its fused form, which it compiles first; the rest come from torch.
_DEEPSPEED_OWN = {"adam", "adamw"}


def demo(
    sparsity: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of gradient entries not sent (0.99 if not given)."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training part.")] = None,
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
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds of training, to see that it runs; not for figures.")
    ] = False,
) -> None:
    """Train a recommender on real data on two local ranks, dense and with DCT, and compare."""
    format = format or ("diabetes" if data is None else "criteo")
    if format not in PRESETS:
        raise typer.BadParameter(f"{format!r}: must be one of {', '.join(PRESETS)}", param_hint="--format")
    _check_data(format, data)
    preset = QUICK if quick else PRESETS[format]
    base = deepspeed_config(
        preset,
        config,
        sparsity=sparsity,
        zero_stage=zero_stage,
        optimizer=optimizer,
        lr=lr,
        batch_size=batch_size,
        ranks=ranks,
    )
    out.mkdir(parents=True, exist_ok=True)
    arguments = ["--format", format, "--seed", str(seed)]
    arguments += ["--epochs", str(epochs or preset.epochs)]
    if data is not None:
        arguments += ["--data", str(data)]
    if quick:
        arguments += ["--max-rows", str(QUICK_ROWS)]
    _compare(base, arguments, ranks, out, json_file, quick=quick)


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

    content: dict[str, Any] = {} if file is None else _read_json(file)
    batch_keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if batch_size is not None or not any(key in content for key in batch_keys):
        for key in batch_keys:
            content.pop(key, None)
        content["train_batch_size"] = batch_size or preset.batch_size
        if content["train_batch_size"] % ranks:
            raise ConfigError(
                f"batch size {content['train_batch_size']}: must be a multiple of {ranks} ranks"
            )
    ours = optimizer is not None or "optimizer" not in content
    if ours:
        content["optimizer"] = {"type": optimizer or OPTIMIZER}
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
    zero = content.setdefault("zero_optimization", {"stage": 0})
    if zero_stage is not None:
        zero["stage"] = zero_stage
    content.setdefault("zero_allow_untested_optimizer", True)
    content.setdefault("steps_per_print", 1_000_000)

    dct = DCTConfig.parse(content.get("dct", {})).updated({"enabled": True})
    if sparsity is not None:
        dct = dct.updated({"data_parallel": {"sparsity": sparsity}})
    content["dct"] = dct.model_dump(mode="json", exclude_defaults=True)
    content["dct"].setdefault("data_parallel", {})["sparsity"] = dct.data_parallel.sparsity
    return content


def _compare(
    config: dict[str, Any],
    arguments: list[str],
    ranks: int,
    out: Path,
    json_file: Path | None,
    *,
    quick: bool,
) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from dct_plugin.config import DCTConfig

    from .progress import RunProgress
    from .report import Comparison, Run, draw, read_metrics, table, verdict
    from .runner import Runner, loopback

    console = Console()
    started = time.monotonic()
    metrics_file = out / "dct.metrics.jsonl"
    metrics_file.unlink(missing_ok=True)
    with_dct = copy.deepcopy(config)
    with_dct["dct"]["metrics"] = {**with_dct["dct"].get("metrics", {}), "path": str(metrics_file), "every": 1}
    dense = {key: value for key, value in config.items() if key != "dct"}
    interface = loopback()
    if interface is not None:
        arguments = [*arguments, "--interface", interface]
    runners = {}
    for name, content in (("dense", dense), ("dct", with_dct)):
        file = out / f"{name}.deepspeed.json"
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        script_arguments = ["--deepspeed_config", str(file), *arguments]
        runners[name] = Runner(name, ranks, script_arguments, out, _environment(ranks, interface))

    events: dict[str, list[dict[str, Any]]] = {}
    with RunProgress(console) as progress:
        for name, runner in runners.items():
            events[name] = runner.run(progress.follow(name))

    metrics = read_metrics(metrics_file)
    if not metrics:
        raise DCTError(
            "the DCT run wrote no metrics, so the plugin was not active in it. See `dct doctor`: is "
            f"TORCH_DEVICE_BACKEND_AUTOLOAD=0 set, or the plugin not installed for {sys.executable}?"
        )
    stage = config["zero_optimization"]["stage"]
    optimizer = config["optimizer"]
    start = events["dct"][0]
    comparison = Comparison(
        dense=Run.from_events("dense", events["dense"], ranks=ranks),
        dct=Run.from_events(
            "DCT",
            events["dct"],
            ranks=ranks,
            metrics=metrics,
            density_target=DCTConfig.parse(with_dct["dct"]).data_parallel.density,
        ),
        ranks=ranks,
        zero_stage=stage,
    )
    title = (
        f"{start['data']}: {start['training_rows']:,} training rows, {start['parameters']:,} weights, "
        f"{ranks} ranks, ZeRO-{stage}, {optimizer['type']} {optimizer['params'].get('lr', '')}, "
        f"batch {start['batch_size']}, {comparison.dct.steps} steps"
    )
    plot = out / "demo.png"
    draw(comparison, plot, title=title.replace(" training rows, ", " training rows,\n", 1))
    console.print()
    console.print(Padding(table(comparison, title=title), (0, 0, 1, 0)))
    for paragraph in verdict(comparison, quick=quick):
        console.print(Text(paragraph), end="\n\n")
    console.print("To repeat each run by itself:")
    for runner in runners.values():
        console.print(Text("  " + runner.command_line), soft_wrap=True)
    files = [str(plot)]
    if json_file is not None:
        content = _record(comparison, start, with_dct, runners)
        content["seconds"] = round(time.monotonic() - started, 1)
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        files.append(str(json_file))
    console.print(Text(f"\nWrote {' and '.join(files)} in {time.monotonic() - started:.0f} s."))
    if not (comparison.dense.ranks_in_step and comparison.dct.ranks_in_step):
        raise typer.Exit(1)


def _environment(ranks: int, interface: str | None) -> dict[str, str]:
    """Environment variables of the ranks."""
    environment = {"OMP_NUM_THREADS": "1"}
    if "DS_ACCELERATOR" not in os.environ and not _enough_gpus(ranks):
        environment["DS_ACCELERATOR"] = "cpu"
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


def _enough_gpus(ranks: int) -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks


def _check_data(format: str, path: Path | None) -> None:
    """Read the beginning here: a wrong file is better said before the ranks start."""
    from .data import load

    if path is None and format != "diabetes":
        raise typer.BadParameter(f"--format {format} needs --data FILE", param_hint="--data")
    if path is not None and not path.is_file():
        raise typer.BadParameter(f"{path}: no such file", param_hint="--data")
    load(format, path, max_rows=1000)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def _record(
    comparison: Comparison, start: dict[str, Any], config: dict[str, Any], runners: dict[str, Runner]
) -> dict[str, Any]:
    """What ``--json`` writes."""
    packages = ("torch", "deepspeed", "numpy", "scikit-learn")
    return {
        "command": shlex.join(["dct", *sys.argv[1:]]),
        "data": {key: start[key] for key in ("data", "rows", "training_rows", "parameters", "batch_size")},
        **comparison.as_dict(),
        "deepspeed_config": config,
        "runs": {name: runner.command_line for name, runner in runners.items()},
        "versions": {
            "dct-plugin": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
    }
