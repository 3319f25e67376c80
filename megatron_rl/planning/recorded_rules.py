"""Rules of `trainer.rollouts_from`: training on the samples that another run has recorded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.observe.sample_files import SAMPLES_FOLDER, recorded_files

FROM = "trainer.rollouts_from"


def recorded_problems(config: RunConfig, config_only: bool) -> Iterable[Violation]:
    """Every violation. The record itself is opened when the run starts. config_only: look up no files."""
    trainer = config.trainer
    if trainer.rollouts_from is None:
        return
    run = Path(trainer.rollouts_from)
    if run.resolve() == Path(trainer.default_local_dir).resolve():
        rule = "must be another folder than trainer.default_local_dir, where this run records its own samples"
        yield Violation({FROM: str(run)}, rule, {"trainer.default_local_dir": f"{run}_again"})
    elif not config_only and not recorded_files(run):
        rule = f"must be the folder of a run that recorded its samples, and {run / SAMPLES_FOLDER} has none"
        yield Violation({FROM: str(run)}, rule, hint="record a run with trainer.recorded_prompts=-1")
