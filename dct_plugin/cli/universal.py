"""``dct universal``: residuals into a DeepSpeed universal checkpoint, which takes none by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import checkpoint
from ..errors import DCTError


def universal(
    source: Annotated[Path, typer.Argument(help="Folder of the checkpoint, e.g. out/global_step100.")],
    target: Annotated[
        Path, typer.Argument(help="The universal checkpoint that ds_to_universal made from it.")
    ],
) -> None:
    """Write what all ranks still owe to the model into one file of the universal checkpoint."""
    # Not as zero/<parameter>/*.pt: DeepSpeed takes every such file for a state of its optimizer.
    if not (target / "zero").is_dir():
        raise DCTError(
            f"{target}: no universal checkpoint (there is no folder zero); run ds_to_universal first"
        )
    typer.echo(f"wrote {checkpoint.gather(source, target)}")
