"""Shrink a model's shape to a tiny one with random weights, for `SCALE=tiny bash scripts/run_70b_ppo.sh`.

    python scripts/make_tiny_model.py --shape configs/models/llama-3-70b --output assets/llama3_70b_tiny

Architecture, activation, norms, grouped queries, untied embeddings and dtype are those of `--shape`; width, depth and
vocabulary are the demo's, whose tokenizer is copied. It knows nothing: it exercises a layout, it does not learn much.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

MARKER = "assets.json"
FORMAT_VERSION = 1
SHRUNK = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
"""Sizes that TP2 x PP2 and rollout TP1 or 2 divide."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TOKEN_KEYS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def tiny_shape(shape: dict, demo: dict) -> dict:
    """`shape`, a config.json, with the sizes of SHRUNK and the vocabulary of `demo`, another config.json."""
    return shape | SHRUNK | {key: demo[key] for key in TOKEN_KEYS}


def build(folder: Path, shape: Path, demo: Path, seed: int) -> None:
    """Fill `folder` with config.json, model.safetensors and the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    content = tiny_shape(*(json.loads((source / "config.json").read_text()) for source in (shape, demo)))
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    torch.manual_seed(seed)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(demo / name, folder / name)
    (folder / MARKER).write_text(json.dumps({"format_version": FORMAT_VERSION, "seed": seed}) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Command line: make the model unless it is there. Exits with 2 rather than replace a folder not its own."""
    parser = argparse.ArgumentParser(description="A tiny random model of a large model's architecture.")
    parser.add_argument("--shape", type=Path, default=Path("configs/models/llama-3-70b"), help="with config.json")
    parser.add_argument("--demo", type=Path, default=Path("assets/demo"), help="made by scripts/make_demo_assets.py")
    parser.add_argument("--output", type=Path, default=Path("assets/llama3_70b_tiny"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args(arguments)

    facts = {"format_version": FORMAT_VERSION, "seed": args.seed}
    marker = args.output / MARKER
    if marker.is_file() and json.loads(marker.read_text()) == facts:
        print(f"{args.output} is ready")
        return
    if args.output.exists() and not marker.is_file() and any(args.output.iterdir()):
        parser.error(f"{args.output} holds files but no {MARKER}: not made by this script; name another --output")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent, prefix=f".{args.output.name}-") as parent:
        unfinished = Path(parent) / args.output.name
        unfinished.mkdir()
        build(unfinished, args.shape, args.demo / "model", args.seed)
        if args.output.exists():
            shutil.rmtree(args.output)
        unfinished.rename(args.output)
    print(f"{args.output} made")


if __name__ == "__main__":
    main()
