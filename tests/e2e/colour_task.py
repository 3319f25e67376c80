"""The colour of a square: 4 colours x 4 places, one token of response, whose first byte names the colour by its rest
modulo 4. An untrained model is right in a quarter of all cases; without the picture no model is better.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0))
REWARD = '''"""The colour of a square."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 if the rest of the first byte modulo 4 is the colour's number, else 0.0."""
    content = solution_str.encode()
    return float(bool(content) and content[0] % 4 == int(ground_truth))
'''


def picture(colour: int, place: int, side: int) -> np.ndarray:
    """A grey square of 2 x 2 places, each `side` pixels wide, of which one has a colour."""
    pixels = np.full((2 * side, 2 * side, 3), 128, np.uint8)
    row, column = divmod(place, 2)
    pixels[row * side : (row + 1) * side, column * side : (column + 1) * side] = COLOURS[colour]
    return pixels


def row(colour: int, pixels: np.ndarray) -> dict:
    """A row of verl's schema."""
    Image.fromarray(pixels).save(content := io.BytesIO(), "PNG")
    return {
        "data_source": "colour",
        "prompt": [{"role": "user", "content": "<image>"}],
        "images": [{"bytes": content.getvalue(), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": str(colour)},
    }


def write_colours(folder: Path, side: int = 28, is_noise: bool = False) -> tuple[str, ...]:
    """Write the 16 prompts and the reward function; return the keys of a run on them.

    is_noise: there are 480 prompts with noise in place of pictures, none of which is seen twice, and 64 others to
    validate on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.RandomState(0)

    def written(name: str, copies: int) -> str:
        cases = [(colour, place) for _ in range(copies) for colour in range(4) for place in range(4)]
        pictures = [picture(*case, side) for case in cases]
        if is_noise:
            pictures = [noise.randint(0, 256, pixels.shape).astype(np.uint8) for pixels in pictures]
        rows = [row(colour, pixels) for (colour, _), pixels in zip(cases, pictures, strict=True)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
        return str(folder / name)

    train = written("train.parquet", 30 if is_noise else 1)
    held_out = written("held_out.parquet", 4) if is_noise else train
    (folder / "colour_reward.py").write_text(REWARD)
    return (
        f"data.train_files={train}",
        f"data.val_files={held_out}",
        "data.image_key=images",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=2",
        f"custom_reward_function.path={folder}/colour_reward.py",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.optim.lr=2e-3",
        "trainer.n_gpus_per_node=1",
        "trainer.test_freq=5",
        "trainer.total_training_steps=30",
    )
