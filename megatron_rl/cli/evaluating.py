"""megatron-rl eval | generate: generate responses to a file of prompts, by a run's engines and in its layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.checkpoint.folders import find
from megatron_rl.checkpoint.identity import SHOWN, digest_of
from megatron_rl.checkpoint.manifest import MANIFEST
from megatron_rl.checkpoint.resume import trained_model, usable_checkpoint
from megatron_rl.cli.options import ConfigPath, Overrides, check_number
from megatron_rl.cli.output import check_output_folder, say
from megatron_rl.cli.tasks import Collapse, Local, made_ready, start_evaluation, startable
from megatron_rl.config.algorithms import uses_rule
from megatron_rl.config.eval_config import unjudged, without_adapters
from megatron_rl.config.load import read_run
from megatron_rl.config.problems import raise_problems
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import PPO
from megatron_rl.errors import ConfigError
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.planning.file_rules import prompt_problems

MOST_ANSWERS = 100_000
MODEL = "actor_rollout_ref.model.path"

Model = Annotated[
    Path | None,
    typer.Option("--model", help="A Hugging Face folder, a global_step_N folder, or a run's folder for its newest."),
]
DataFile = Annotated[Path | None, typer.Option("--data", help="A parquet or jsonl file; default: data.val_files.")]
Out = Annotated[
    Path, typer.Option("--out", help="The folder to write. An evaluation that was stopped there is resumed.")
]
Answers = Annotated[
    int | None,
    typer.Option("--samples", help="Answers to each prompt, sampled where more than one; default: val_kwargs.n."),
]


def eval_command(
    config: ConfigPath,
    out: Out,
    overrides: Overrides = None,
    model: Model = None,
    data: DataFile = None,
    samples: Answers = None,
    local: Local = False,
    collapse: Collapse = False,
) -> None:
    """Generate responses to a file of prompts and score them: pass@k, maj@k with intervals. Trains nothing."""
    given = [*(overrides or ()), *chosen(out, data, samples)]
    if model is not None:
        given.append(f"{MODEL}={model_folder(model, out, lambda: check_prompts(config, given, uses_rule))}")
    run_config = startable(config, given, PPO, collapse, of_model(model))
    start_evaluation(made_ready(run_config, local), local)


def generate_command(
    config: ConfigPath,
    out: Out,
    overrides: Overrides = None,
    model: Model = None,
    data: DataFile = None,
    samples: Answers = None,
    local: Local = False,
    collapse: Collapse = False,
) -> None:
    """Generate responses to a file of prompts, and write them. Nothing scores them: no ground truth is needed."""
    given = [*(overrides or ()), *chosen(out, data, samples)]
    if model is not None:
        given.append(f"{MODEL}={model_folder(model, out, lambda: check_prompts(config, given, None))}")
    run_config = startable(config, given, PPO, collapse, lambda read: unjudged(of_model(model)(read)))
    start_evaluation(made_ready(run_config, local), local)


def check_prompts(path: Path, given: Sequence[str], is_judged: Callable[[RunConfig], bool] | None) -> None:
    """Raise ConfigError for a configuration or prompts that cannot be read.

    is_judged: whether a run's rows need a ground truth; None: they do not.
    """
    reading = read_run(path, given, PPO)
    raise_problems("this run cannot start", reading.violations)
    config = reading.config
    if isinstance(config, RunConfig):
        judged = ["data.val_files"] if is_judged is not None and is_judged(config) else []
        raise_problems("this run cannot start", [*prompt_problems(config, judged)])


def chosen(out: Path, data: Path | None, samples: int | None) -> list[str]:
    """Return the overrides that options stand for. Raises ConfigError for a number out of its range."""
    check_number("--samples", samples, 1, MOST_ANSWERS)
    check_output_folder("--out", out)
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    given = ["trainer.val_only=true", f"trainer.default_local_dir={out}"]
    if data is not None:
        given.append(f"data.val_files={data}")
    if samples is not None:
        given += [f"{kwargs}.n={samples}", *([f"{kwargs}.do_sample=true"] if samples > 1 else [])]
    return given


def of_model(model: Path | None) -> Callable[[RunConfig], RunConfig]:
    """Return the change of a configuration that `--model` asks for.

    A model that is named has no adapters next to its weights, because an export merges them.
    """
    return without_adapters if model is not None else lambda config: config


def model_folder(model: Path, out: Path, check: Callable[[], None]) -> Path:
    """Return `model` if it is a Hugging Face folder; if it is a checkpoint, export it and return that folder.

    check: called before an export; where it raises, nothing is written.
    Of a run's folder the newest checkpoint counts; of one without checkpoints the model that it has written at its end.
    Raises ConfigError where it is none of these.
    """
    if (model / "config.json").is_file():
        return model
    at_end = trained_model(model)
    try:
        if at_end is not None and not find(model):
            say(f"{model} has no checkpoints; {at_end} is its trained model")
            return at_end
        checkpoint = usable_checkpoint(model).resolve()
    except ConfigError as error:
        raise ConfigError(f"--model {model} is no Hugging Face folder, which has a config.json; {error}") from error
    target = out / export_name(checkpoint)
    if target.is_dir():
        return target  # of the evaluation that was stopped
    check()
    quiet_libraries()
    from megatron_rl.checkpoint.export_saved import export_saved

    export_saved(checkpoint, "actor", target, None)
    say(f"actor of {checkpoint} written to {target}")
    return target


def export_name(checkpoint: Path) -> str:
    """Return the name of the folder of a checkpoint's export: by its manifest, which has a digest of each file, so that
    another checkpoint under the same path is exported again.
    """
    return f"{checkpoint.name}_{digest_of(checkpoint / MANIFEST)[:SHOWN]}"
