"""megatron-rl view | explain: what a run did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_rl.cli.options import check_number
from megatron_rl.cli.output import check_output_file, print_json, refuse_to_lose_output, say, write_output
from megatron_rl.config.file_kinds import kind_of
from megatron_rl.errors import ConfigError
from megatron_rl.observe.program import next_command
from megatron_rl.observe.sample_files import read_step
from megatron_rl.observe.summary import plain_table
from megatron_rl.observe.terminal import Terminal
from megatron_rl.view.page import page
from megatron_rl.view.page_data import page_data, page_samples
from megatron_rl.view.run_files import FOLDER, RunFiles, read_run
from megatron_rl.view.sample_life import check_rows, life_lines, sample_life, token_table
from megatron_rl.view.sample_list import (
    SAMPLE_HEADINGS,
    STEP_HEADINGS,
    listed_samples,
    listed_steps,
    sample_rows,
    step_rows,
)
from megatron_rl.view.sample_pictures import pictures_of

MOST_SAMPLES = 100_000
WIDE = 200
"""Columns that the numbers of a token need."""
MOST_SAID = 5
OUTSIDE = "Read also files outside of the run's folder, which links in it and its plan.json name."


def view_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    other: Annotated[Path | None, typer.Argument(help="The folder of another run to compare it with.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: view.html in the run's folder.")] = None,
    most: Annotated[int, typer.Option("--samples", help="Samples of each run on the page, of all steps alike.")] = 1000,
    outside: Annotated[bool, typer.Option("--outside", help=OUTSIDE)] = False,
) -> None:
    """Write one HTML file to look at a run: curves, times, samples with their tokens, the plan. Needs no server.

    Works while the run continues: the same command again, and a reload, show what has come.
    """
    check_number("--samples", most, 1, MOST_SAMPLES)
    records = [read_run(folder, outside) for folder in (run, other) if folder is not None]
    target = out or run / "view.html"
    check_output_file("--out", target, (".html",))
    samples, total = page_samples(records, most)
    own = [[sample for sample in samples if sample["run"] == number] for number in range(len(records))]
    pictures = [pictures_of(record.folder, shown) for record, shown in zip(records, own, strict=True)]
    data = page_data(records, most) | {"total_samples": total, "pictures": pictures}
    text = page(data, samples, " | ".join(record["name"] for record in data["runs"]))
    write_output(target, text.encode(errors="backslashreplace"))
    say_left_out([sentence for record in records for sentence in record.left_out])
    say(f"written to {target}: {len(samples)} of {total} samples, {target.stat().st_size / 1e6:.1f} MB")
    refuse_to_lose_output()


def say_left_out(sentences: Sequence[str]) -> None:
    """Say to stderr what is not shown: the first few things."""
    more = [f"and {len(sentences) - MOST_SAID} more of the kind"] if len(sentences) > MOST_SAID else []
    for sentence in (*sentences[:MOST_SAID], *more):
        say(sentence, Terminal(stderr=True))


def explain_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    step: Annotated[
        int | None, typer.Option("--step", help="The step that trained the sample. Default: list all recorded steps.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", help="Its number, from 0. Default: list the samples of the step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    outside: Annotated[bool, typer.Option("--outside", help=OUTSIDE)] = False,
) -> None:
    """Print a sample's life: prompt, tokens, versions, rewards, advantages, its share of the loss.

    Without --sample, the recorded samples of a step; without --step, the best and the worst one of each step.
    """
    is_folder, opened = kind_of(run) == FOLDER, RunFiles(run, outside)
    files = opened.samples() if is_folder else {}
    say_left_out(opened.left_out)
    if not files:
        why = "has no recorded samples" if is_folder else "is no folder"
        raise ConfigError(f"{run} {why}; try: the folder of a run with trainer.recorded_prompts=1 or more")
    if step is None and sample is not None:
        raise ConfigError(f"--sample {sample} needs the step of the sample; try: --step {max(files)} --sample {sample}")
    if step is not None and step not in files:
        nearest = min(files, key=lambda known: abs(known - step))
        raise ConfigError(f"--step {step} is none of the {len(files)} recorded steps; try: --step {nearest}")
    if step is None:
        print_steps(run, listed_steps(files), as_json)
    elif sample is None:
        print_samples(run, step, listed_samples(read_step(files[step])), as_json)
    else:
        recorded = read_step(files[step])
        check_rows(recorded)
        print_life(sample_life(recorded, sample), as_json)
    refuse_to_lose_output()


def print_steps(run: Path, steps: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print the recorded steps of a run, and the command that shows the worst sample of the last one."""
    if as_json:
        print_json({"steps": steps})
        return
    Terminal().print(plain_table(f"Recorded steps of {run}", STEP_HEADINGS, step_rows(steps)), markup=False)
    last = next((step for step in reversed(steps) if "worst" in step), None)
    if last is not None:
        say("one sample, token by token:")
        say(f"  {next_command('explain', run, '--step', last['step'], '--sample', last['worst']['sample'])}")


def print_samples(run: Path, step: int, samples: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print the recorded samples of a step, and the command that shows the first of them."""
    if as_json:
        print_json({"step": step, "samples": samples})
        return
    Terminal().print(
        plain_table(f"Recorded samples of step {step}", SAMPLE_HEADINGS, sample_rows(samples)), markup=False
    )
    if samples:
        say(f"one sample, token by token:\n  {next_command('explain', run, '--step', step, '--sample', 0)}")


def print_life(life: dict[str, Any], as_json: bool) -> None:
    """Print the life of a sample."""
    if as_json:
        print_json(life)
        return
    console = Terminal()
    for line in life_lines(life):
        say(line, console)
    headings, rows = token_table(life)
    wide = Terminal(width=max(console.width, WIDE))
    wide.print(plain_table("Tokens", headings, rows), markup=False)
