"""How many engine steps drafts save, and what they cost in seconds: the same batches drawn without and with them.

    python scripts/bench/drafts.py [--config configs/agents/calculator.yaml] [--steps 3] [--prompts N] [KEY=VALUE ...]

One rank draws the batches of a configuration, without training between them, with rollout.speculative=null, ngram and
earlier. All must draw the same tokens. Printed are the engine's steps, the tokens that a request gets in a step, the
share of guesses that were right, and seconds of drawing. --prompts: of the training file, the first N, as a batch of
every step, so that every step but the first finds answers of the step before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import pyarrow.parquet
import torch

from megatron_rl.config.load import read_config
from megatron_rl.controller.repairs import repairs_of
from megatron_rl.controller.run import open_run

REPOSITORY = Path(__file__).parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
METRICS = ("rollout/tokens_per_step", "rollout/drafts_accepted")
WAYS = ("null", "ngram", "earlier")


def settings_of(given: argparse.Namespace, folder: Path) -> list[str]:
    """Settings that all ways to draw have in common."""
    megatron = "actor_rollout_ref.actor.megatron"
    settings = [
        *("trainer.n_gpus_per_node=1", "trainer.launcher=local", "trainer.validation_data_dir=null"),
        *(f"{megatron}.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")),
        f"trainer.total_training_steps={given.steps + 1}",
        *given.settings,
    ]
    if given.prompts is not None:
        config, _ = read_config(given.config, settings)
        files, few = config.data.train_files, folder / "prompts.parquet"
        rows = pyarrow.parquet.read_table(files if isinstance(files, str) else files[0])[: given.prompts]
        pyarrow.parquet.write_table(rows, few)
        settings += [f"data.train_files={few}", f"data.train_batch_size={given.prompts}"]
    return settings


def draw(config_file: Path, settings: list[str], num_steps: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Figures of all batches but the first, which compiles, and the tokens of each batch."""
    config, _ = read_config(config_file, settings)
    figures, tokens = {"engine steps": 0.0, "seconds": 0.0}, []
    metrics: dict[str, list[float]] = {name: [] for name in METRICS}
    with repairs_of(config) as repairs, open_run(repairs) as run:
        for step in range(1, num_steps + 2):
            run.sampler.queue.reports, begun = [], time.monotonic()
            batch = run.sampler.next(step)
            seconds = time.monotonic() - begun
            run.sampler.load_weights(step)
            tokens.append(batch.rows.sampled_ids.values())
            if step > 1:
                figures["seconds"] += seconds
                figures["engine steps"] += sum(report.num_steps for report in run.sampler.queue.reports)
                for name in METRICS:
                    metrics[name].append(batch.metrics.get(name, 1.0 if "tokens" in name else 0.0))
    return figures | {name: sum(values) / len(values) for name, values in metrics.items()}, tokens


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs/agents/calculator.yaml")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shared, drawn = settings_of(given, Path(folder)), {}
        for way in WAYS:
            own = [f"{ROLLOUT}.speculative={way}", f"trainer.default_local_dir={folder}/{way}"]
            drawn[way] = draw(given.config, own + shared, given.steps)
    plain, plain_tokens = drawn["null"]
    for name in plain:
        print(f"{name:24}", *(f"{figures[name]:8.2f} {way}" for way, (figures, _) in drawn.items()))
    for way, (figures, tokens) in drawn.items():
        fewer, same = plain["engine steps"] / figures["engine steps"], all(map(torch.equal, tokens, plain_tokens))
        print(f"{way}: {fewer:.2f} times fewer engine steps; same tokens: {same}")


if __name__ == "__main__":
    main()
