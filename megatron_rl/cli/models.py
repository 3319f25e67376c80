"""megatron-rl export | average: Hugging Face folders from checkpoints. One process, no GPU."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.checkpoint.folders import HF_FOLDER
from megatron_rl.checkpoint.output_paths import refuse_target
from megatron_rl.checkpoint.resume import usable_checkpoint
from megatron_rl.errors import ConfigError
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.observe.program import next_command
from megatron_rl.observe.terminal import Terminal


class RoleName(StrEnum):
    """The roles that a checkpoint may have."""

    ACTOR = "actor"
    CRITIC = "critic"


def export_command(
    checkpoint: Annotated[Path, typer.Option(help="A global_step_N folder, or a run's folder for its newest.")],
    target: Annotated[Path, typer.Option(help="The Hugging Face folder to write; it must not exist.")],
    role: Annotated[RoleName, typer.Option(help="critic: as a reward model with one label.")] = RoleName.ACTOR,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapters alone, as PEFT's folder, instead of merging them.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            help="The model folder that the run started from, if it has moved: for adapters and pass-through tensors."
        ),
    ] = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, or its LoRA adapters for PEFT. Needs no GPU."""
    refuse_target(target, nearest=Path(f"{target}-{checkpoint.name}"))
    folder = usable_checkpoint(checkpoint)
    if not (folder / role.value).is_dir():
        raise ConfigError(f"--role {role.value}: {folder} has none, as its run trained none; try: --role actor")
    quiet_libraries()
    from megatron_rl.checkpoint.export_saved import export_saved, export_saved_adapter
    from megatron_rl.checkpoint.hf_folder import was_quantised

    if adapter:
        export_saved_adapter(folder, role.value, target, base)
    else:
        export_saved(folder, role.value, target, base)
    Terminal().print(f"{role.value} of {folder} written to {target}", soft_wrap=True, markup=False)
    if role is RoleName.ACTOR:
        Terminal().print("\n".join(["Next:", *next_lines(target, adapter)]), soft_wrap=True, markup=False)
    if not adapter and was_quantised(folder / role.value / HF_FOLDER):
        note = "its weights were read in fewer bits; they are written as they were trained, without quantization_config"
        Terminal().print(note, soft_wrap=True, markup=False)


def next_lines(target: Path, adapter: bool) -> list[str]:
    """Return what can be done with an exported actor, or with its adapters."""
    if adapter:
        return [f"  actor_rollout_ref.model.lora.adapter_path={target}  # starts another run from these adapters"]
    evaluation = next_command("eval", "--config", "RUN.yaml", "--model", target, "--out", f"{target}_eval")
    return [
        f"  {evaluation}  # scores its responses; RUN.yaml: the configuration of its run",
        f"  actor_rollout_ref.model.path={target}  # starts another run from it",
    ]


def average_command(
    checkpoints: Annotated[
        list[Path],
        typer.Option(help="global_step_N folders or Hugging Face folders; a run's folder for all of its checkpoints."),
    ],
    target: Annotated[Path, typer.Option(help="The Hugging Face folder to write; it must not exist.")],
    further: Annotated[list[Path] | None, typer.Argument(help="More of --checkpoints.")] = None,
    weights: Annotated[str | None, typer.Option(help="1,1,2: what each counts, to any total. Default: equal.")] = None,
    ema: Annotated[
        float | None, typer.Option(help="Exponential moving average with this decay, over them in their order.")
    ] = None,
    role: Annotated[RoleName, typer.Option(help="critic: for reward models.")] = RoleName.ACTOR,
) -> None:
    """Write the average of several checkpoints as a Hugging Face folder. Needs no GPU."""
    quiet_libraries()
    from megatron_rl.checkpoint.average import Averaging

    if len(checkpoints) > 1 and further:
        raise ConfigError("name all checkpoints after one --checkpoints, or each after one of its own, in one order")
    made = Averaging.of([*checkpoints, *(further or [])], weights, ema, role.value, target)
    made.write()
    for line in made.lines():
        Terminal().print(line, soft_wrap=True, markup=False)
