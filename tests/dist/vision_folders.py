"""Tiny random vision-language models as whole folders: language model, tower, tokenizer, chat template, and settings of
the image processor. Everything is float32, and every tensor matters for what the model returns.

Ids: 0 pads, 1 ends a turn, 2 begins one, 3 to 258 are bytes, 259 to 262 the names of four colours; then the marks of
images. Text that is drawn from ids 3 to 258 has no picture in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from make_image_assets import FIRST_MARK, MARK_KEYS, MARKS, save_processor, save_tokenizer
from safetensors.torch import load_file, save_file
from tiny_models import QWEN3, SIZES, save
from tiny_qwen3_5 import DELTA, EXPERTS, drawn

FIRST_BYTE, FIRST_COLOUR = 3, 259
IMAGE, VIDEO, VISION_START, VISION_END = range(FIRST_MARK, FIRST_MARK + len(MARKS))
VOCABULARY = FIRST_MARK + len(MARKS)
MARK_SETTINGS = dict(zip(MARK_KEYS, range(FIRST_MARK, VOCABULARY), strict=True))
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": None, "initializer_range": 0.1}
TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 128}
TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.1}
QWEN3_TOWER = TOWER | {"patch_size": 16, "in_channels": 3, "num_position_embeddings": 64}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
INTERLEAVED = ROPE | {"mrope_section": [10, 7, 7], "mrope_interleaved": True}
PARTIAL = ROPE | {"mrope_section": [4, 4, 4], "mrope_interleaved": True, "partial_rotary_factor": 0.5}


def save_qwen25_vl_folder(folder: Path, **changes) -> str:
    """A Qwen2.5-VL: windows in the first layer of its tower, three sections in its rotary embedding.

    changes: of the language model's settings, here and below.
    """
    tower = TOWER | {"patch_size": 14, "in_chans": 3, "window_size": 56, "fullatt_block_indexes": [1]}
    return made("Qwen2_5_VL", folder, SIZES, ROPE | {"mrope_section": [6, 5, 5]}, tower, changes)


def save_qwen3_vl_folder(folder: Path, **changes) -> str:
    """A Qwen3-VL with tied embeddings, alternating sections, and one deepstack level."""
    tower = QWEN3_TOWER | {"deepstack_visual_indexes": [0]}
    return made("Qwen3VL", folder, QWEN3, INTERLEAVED, tower, {"tie_word_embeddings": True, **changes})


def save_qwen3_vl_moe_folder(folder: Path, **changes) -> str:
    """A Qwen3-VL of 6 experts, 2 to a token, with two deepstack levels."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    tower = QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]}
    path = made("Qwen3VLMoe", folder, QWEN3 | experts, INTERLEAVED, tower, changes)
    file = folder / "model.safetensors"
    tensors = {  # as they are published; transformers writes other dims, and reads both
        name: tensor.transpose(-1, -2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def save_qwen3_5_vl_folder(folder: Path, **changes) -> str:
    """A dense Qwen3.5 that reads images: every second layer follows the gated delta rule."""
    return made("Qwen3_5", folder, DELTA | {"partial_rotary_factor": 0.5}, PARTIAL, QWEN3_TOWER, changes, drawn)


def save_qwen3_5_moe_vl_folder(folder: Path, **changes) -> str:
    """The same with 6 experts, 2 to a token, and a gated shared one beside them."""
    text = {name: value for name, value in DELTA.items() if name != "intermediate_size"}
    text |= EXPERTS | {"partial_rotary_factor": 0.5}
    return made("Qwen3_5Moe", folder, text, PARTIAL, QWEN3_TOWER, changes, drawn)


def made(
    family: str,
    folder: Path,
    text: dict,
    rope: dict,
    tower: dict,
    changes: dict,
    redrawn: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
) -> str:
    """Save a folder. family: what transformers' classes begin with. text, rope, tower: settings of the parts."""
    torch.manual_seed(0)
    settings = {**text, **TEXT, "rope_parameters": rope, "tie_word_embeddings": False, **changes}
    config = getattr(transformers, f"{family}Config")(
        text_config=settings,
        vision_config=tower,
        tie_word_embeddings=settings["tie_word_embeddings"],
        **MARK_SETTINGS,
    )
    model = redrawn(getattr(transformers, f"{family}ForConditionalGeneration")(config))
    for name, parameter in model.model.visual.named_parameters():
        if "norm" in name and name.endswith("weight"):  # else 1, whatever becomes of it
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    path = save(model, folder)
    save_tokenizer(folder)
    save_processor(folder, tower["patch_size"])
    return path
