"""How many engine steps drafts save, and what they cost in seconds: the same batches drawn without and with them.

    python scripts/bench/drafts.py [--config configs/agents/calculator.yaml] [--steps 3] [KEY=VALUE ...]

One rank draws the batches of a configuration, without training between them, first with rollout.speculative=null and
then with ngram. Both must draw the same tokens. Printed are the engine's steps, the tokens that a request gets in a
step, the share of guesses that were right, and seconds of drawing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from megatron_rl.config.load import read_config
from megatron_rl.controller.repairs import repairs_of
from megatron_rl.controller.run import open_run

REPOSITORY = Path(__file__).parents[2]
ROLLOUT = "actor_rollout_ref.rollout"


def draw(given: argparse.Namespace, speculative: str, folder: Path) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Figures of all batches but the first, which compiles, and the tokens of each batch."""
    config, _ = read_config(
        given.config,
        [
            *(f"{ROLLOUT}.speculative={speculative}", "trainer.n_gpus_per_node=1", "trainer.launcher=local"),
            *(f"trainer.total_training_steps={given.steps + 1}", f"trainer.default_local_dir={folder / speculative}"),
            *("trainer.validation_data_dir=null", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"),
            *given.settings,
        ],
    )
    figures, tokens = {"engine steps": 0.0, "seconds": 0.0}, []
    metrics: dict[str, list[float]] = {}
    with repairs_of(config) as repairs, open_run(repairs) as run:
        for step in range(1, given.steps + 2):
            run.sampler.backlog.reports, begun = [], time.monotonic()
            batch = run.sampler.next(step)
            seconds = time.monotonic() - begun
            run.sampler.load_weights(step)
            tokens.append(batch.rows.sampled_ids.values())
            if step > 1:
                figures["seconds"] += seconds
                figures["engine steps"] += sum(report.num_steps for report in run.sampler.backlog.reports)
                for name in ("rollout/tokens_per_step", "rollout/drafts_accepted"):
                    metrics.setdefault(name, []).append(batch.metrics.get(name, 1.0 if "tokens" in name else 0.0))
    return figures | {name: sum(values) / len(values) for name, values in metrics.items()}, tokens


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs/agents/calculator.yaml")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, plain_tokens = draw(given, "null", Path(folder))
        drafted, tokens = draw(given, "ngram", Path(folder))
    same = all(map(torch.equal, tokens, plain_tokens))
    for name, without in plain.items():
        print(f"{name:24} {without:8.2f} without, {drafted[name]:8.2f} with")
    print(f"{plain['engine steps'] / drafted['engine steps']:.2f} times fewer engine steps; same tokens: {same}")


if __name__ == "__main__":
    main()
