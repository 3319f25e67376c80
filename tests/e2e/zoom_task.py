"""A tool that zooms: the prompt's picture shows which of four places to look at, and only a crop of it shows the colour
that is asked for. Every token ends a turn, so a place and a colour are one token each, by its rest modulo 4. A colour
counts where it was seen: by chance one of 16 responses is right. A teacher who sees nothing says one of four letters.

The large picture has 448 x 448 pixels, of which the model sees 56 x 56: the dark place, and little of the colour, which
16 x 16 of its pixels have.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from colour_task import COLOURS
from make_image_assets import FIRST_MARK
from PIL import Image
from vision_folders import FIRST_BYTE

SIDE, MARK = 448, 16
CROPS = (*COLOURS, (40, 40, 40), (200, 200, 200))
"""Colours of crops: of the right place, and of the others."""
GREYS = {"train": 200, "held_out": 220}
"""How light pictures are, by file."""
ENVIRONMENT = '''"""Zoom into the prompt's picture, then name the colour."""

import io

from PIL import Image

from megatron_rl.agents.observation import InitialConversation, Observation

SIDE, MARK = 448, 16


def rest(text):
    content = text.encode()
    return content[0] % 4 if content else -1


class Zoom:
    def reset(self, row):
        self.picture = Image.open(io.BytesIO(row["images"][0]))
        self.colour, self.place = int(row["ground_truth"]), row["extra_info"]["place"]
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        if self.turns == 2:
            return None, float(self.is_right and rest(turn.text) == self.colour), True
        place = rest(turn.text)
        self.is_right = place == self.place
        top, left = (SIDE // 4 + SIDE // 2 * half - MARK // 2 for half in divmod(place, 2))
        crop = self.picture.crop((left, top, left + MARK, top + MARK))
        content = [{"type": "image", "image": crop}]
        return Observation(({"role": "user", "content": content},), counts={"right": float(self.is_right)})


class Anew(Zoom):
    """Shows the crop in another conversation."""

    def step(self, turn):
        said = super().step(turn)
        if not isinstance(said, Observation):
            return said
        return Observation(anew=InitialConversation(said.messages), counts=said.counts)
'''
AGENT = '''"""The same as an agent that speaks OpenAI's protocol."""

import base64
import io

import openai
from PIL import Image

SIDE, MARK = 448, 16


def rest(text):
    content = text.encode()
    return content[0] % 4 if content else -1


async def run(task, endpoint):
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = list(task["prompt"])
    url = messages[0]["content"][0]["image_url"]["url"]
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    reply = await client.chat.completions.create(model="policy", messages=messages)
    said = reply.choices[0].message.content
    top, left = (SIDE // 4 + SIDE // 2 * half - MARK // 2 for half in divmod(rest(said), 2))
    picture.crop((left, top, left + MARK, top + MARK)).save(crop := io.BytesIO(), "PNG")
    url = "data:image/png;base64," + base64.b64encode(crop.getvalue()).decode()
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    messages += [{"role": "assistant", "content": said}, shown]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    is_right = rest(said) == task["extra_info"]["place"]
    return float(is_right and rest(reply.choices[0].message.content) == int(task["ground_truth"]))
'''


def picture(colour: int, place: int, grey: int = 200) -> Image.Image:
    """A grey picture with a dark quarter, in whose middle is a small mark of a colour."""
    pixels = np.full((SIDE, SIDE, 3), grey, np.uint8)
    half = SIDE // 2
    top, left = (half * part for part in divmod(place, 2))
    pixels[top : top + half, left : left + half] = 40
    top, left = (start + half // 2 - MARK // 2 for start in (top, left))
    pixels[top : top + MARK, left : left + MARK] = COLOURS[colour]
    return Image.fromarray(pixels)


def row(colour: int, place: int, grey: int) -> dict:
    """A row of verl's schema."""
    return {
        "data_source": "zoom",
        "prompt": [{"role": "user", "content": "<image>"}],
        "images": [encoded(picture(colour, place, grey))],
        "reward_model": {"style": "rule", "ground_truth": str(colour)},
        "extra_info": {"place": place},
    }


def encoded(image: Image.Image) -> dict:
    """A value of a column of images."""
    image.save(content := io.BytesIO(), "PNG")
    return {"bytes": content.getvalue(), "path": None}


def write_lessons(folder: Path, number: int = 960, batch: int = 32) -> tuple[str, ...]:
    """Write conversations in which both answers are random letters; return the keys of `sft` with them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(0), []
    for _ in range(number):
        shown = picture(draw.randrange(4), draw.randrange(4)), Image.new("RGB", (MARK, MARK), draw.choice(CROPS))
        said = [{"role": "assistant", "content": draw.choice("ABCD")} for _ in shown]
        messages = [message for answer in said for message in ({"role": "user", "content": "<image>"}, answer)]
        rows.append({"messages": messages, "images": [*map(encoded, shown)]})
    for name, some in (("lessons", rows), ("held_out", rows[:batch])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), folder / f"{name}.parquet")
    return (
        f"data.train_files={folder}/lessons.parquet",
        f"data.val_files={folder}/held_out.parquet",
        f"data.train_batch_size={batch}",
        "data.max_length=96",
        "data.mm_processor_kwargs.max_pixels=3136",
        f"trainer.total_training_steps={number // batch}",
    )


def one_token_turns(path: str) -> str:
    """Let every token but the marks end a turn."""
    file = Path(path) / "generation_config.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(known | {"eos_token_id": [1, *range(FIRST_BYTE, FIRST_MARK)]}))
    return path


def write_zoom(folder: Path, with_agent: bool = False) -> tuple[str, ...]:
    """Write 16 prompts, as many others to validate on, and the environment, or the agent; return the keys of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, grey in GREYS.items():
        rows = [row(colour, place, grey) for colour in range(4) for place in range(4)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "zoom.py").write_text(AGENT if with_agent else ENVIRONMENT)
    turns = "actor_rollout_ref.rollout.multi_turn"
    kind = (f"{turns}.agent.path",) if with_agent else (f"{turns}.environment.name=Zoom", f"{turns}.environment.path")
    return (
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/held_out.parquet",
        "data.image_key=images",
        "data.mm_processor_kwargs.max_pixels=3136",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=48",
        f"{turns}.enable=true",
        f"{turns}.max_assistant_turns=2",
        *kind[:-1],
        f"{kind[-1]}={folder}/zoom.py",
        "custom_reward_function.path=null",
        "custom_reward_function.name=null",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.entropy_coeff=0.02",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "trainer.n_gpus_per_node=1",
        "trainer.test_freq=5",
        "trainer.total_training_steps=40",
    )
