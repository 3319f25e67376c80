"""Make the demo with images: prompts that show a square of four places, and a tiny model that reads images.

    python scripts/make_image_assets.py --output assets/images --seed 0

    assets/images/train.parquet  256 questions in verl's row schema; the name of the colour is the ground truth
    assets/images/test.parquet   64 others
    assets/images/model/         Hugging Face folder: tokenizer, chat template, image processor and a Qwen3-VL
    assets/images/assets.json    seed and format version; written last, so it marks a finished folder

One place of four has a colour, the others are of a grey that differs between images. The model learns with
`megatron-rl sft` (configs/stages/image_model_cpu.yaml) from a teacher that sees nothing and names any of the four
colours. Reinforcement learning makes it look.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_demo_assets import MARKER, finished, replace_or_exit, write_parquet

FORMAT_VERSION = 1
STAGE = Path(__file__).resolve().parents[1] / "configs/stages/image_model_cpu.yaml"
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
SIDE = 32  # pixels of a place, which are one token
GREYS = (64, 192)
PAD, END, BEGIN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
MARK_KEYS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
FIRST_MARK = 3 + 256 + len(COLOURS)
"""Ids: 0 pads, 1 ends a turn, 2 begins one, 3 to 258 are bytes, 259 to 262 names of colours, then the marks."""
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def image(colour: str, place: int, grey: int) -> bytes:
    """A PNG of 2 x 2 places, of which one has a colour."""
    from PIL import Image

    pixels = Image.new("RGB", (2 * SIDE, 2 * SIDE), (grey,) * 3)
    top, left = divmod(place, 2)
    pixels.paste(COLOURS[colour], (left * SIDE, top * SIDE, (left + 1) * SIDE, (top + 1) * SIDE))
    pixels.save(content := io.BytesIO(), "PNG")
    return content.getvalue()


def cases(seed: int) -> list[tuple[str, int, int]]:
    """(colour, place, grey) of 320 images, no two alike, in a seeded order."""
    greys = range(*GREYS, (GREYS[1] - GREYS[0]) * 16 // 320)
    every = [(colour, place, grey) for colour in COLOURS for place in range(4) for grey in greys][:320]
    random.Random(seed).shuffle(every)
    return every


def row(case: tuple[str, int, int], split: str) -> dict:
    """A question in verl's row schema."""
    return {
        "data_source": "demo/colours",
        "prompt": [{"role": "user", "content": "<image>Colour?"}],
        "images": [{"bytes": image(*case), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": case[0]},
        "extra_info": {"split": split, "place": case[1]},
    }


def lessons(every: list[tuple[str, int, int]], number: int, seed: int) -> list[dict]:
    """What the teacher said of images: any colour."""
    draw = random.Random(f"lessons,{seed}")
    shown = [(row(case, "lesson"), draw.choice([*COLOURS])) for case in draw.choices(every, k=number)]
    return [
        {"messages": [*one["prompt"], {"role": "assistant", "content": said}], "images": one["images"]}
        for one, said in shown
    ]


def save_tokenizer(folder: Path) -> None:
    """Bytes, four colours, and the marks of turns and images, with a chat template of text and image parts."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [PAD, END, BEGIN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END, BEGIN])
    tokenizer.add_tokens([*COLOURS])
    tokenizer.add_special_tokens([*MARKS])
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, pad_token=PAD, eos_token=END
    )
    assert whole.convert_tokens_to_ids([*COLOURS, *MARKS]) == [*range(FIRST_MARK - 4, FIRST_MARK + 4)]
    whole.save_pretrained(folder)


def save_processor(folder: Path, patch_size: int, most_tokens: int = 16) -> None:
    """The settings of an image processor that makes 1 to `most_tokens` tokens of an image."""
    side = 2 * patch_size
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": side * side, "longest_edge": side * side * most_tokens},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "rescale_factor": 1 / 255,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))


def save_untrained(folder: Path, seed: int) -> None:
    """A Qwen3-VL in float32, 0.6M parameters and 0.3M of its tower, initialised from `seed`."""
    import torch
    import transformers

    text = {
        "vocab_size": FIRST_MARK + len(MARKS),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": SIDE // 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    }
    torch.manual_seed(seed)
    marks = {key: FIRST_MARK + number for number, key in enumerate(MARK_KEYS)}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **marks)
    transformers.Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)
    save_tokenizer(folder)
    save_processor(folder, SIDE // 2)


def build(folder: Path, seed: int) -> dict:
    """Fill `folder` with all assets and return what `assets.json` says."""
    import yaml

    every = cases(seed)
    train, held_out = every[:256], every[256:]
    write_parquet([row(case, "train") for case in train], folder / "train.parquet")
    write_parquet([row(case, "test") for case in held_out], folder / "test.parquet")
    stage = yaml.safe_load(STAGE.read_text())
    number = stage["trainer"]["total_training_steps"] * stage["data"]["train_batch_size"]
    with tempfile.TemporaryDirectory(dir=folder, prefix="tuning-") as name:
        work = Path(name)
        write_parquet(lessons(train, number, seed), work / "lessons.parquet")
        write_parquet(lessons(held_out, 64, seed), work / "held_out.parquet")
        save_untrained(work / "untrained", seed)
        overrides = {
            "data.train_files": work / "lessons.parquet",
            "data.val_files": work / "held_out.parquet",
            "actor_rollout_ref.model.path": work / "untrained",
            "trainer.default_local_dir": work / "stage",
        }
        command = [sys.executable, "-m", "megatron_rl", "sft", "--local", "--config", str(STAGE)]
        subprocess.run([*command, *(f"{key}={value}" for key, value in overrides.items())], check=True)
        shutil.move(work / "stage/hf_model", folder / "model")
    facts = {"format_version": FORMAT_VERSION, "seed": seed}
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main(arguments: list[str] | None = None) -> None:
    """Command line: make the assets unless they are finished. Exits with 2 rather than replace a folder not its own."""
    parser = argparse.ArgumentParser(description="Make the demo with images: prompts and a tuned model.")
    parser.add_argument("--output", type=Path, default=Path("assets/images"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the images, the model and its training")
    args = parser.parse_args(arguments)

    if finished(args.output, MARKER, args.seed, FORMAT_VERSION) is not None:
        print(f"{args.output} is ready")
        return
    started = time.monotonic()
    replace_or_exit(parser, args.output, lambda folder: build(folder, args.seed))
    print(f"{args.output} made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
