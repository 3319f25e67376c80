"""Tiny random models that read text and images, with the files of a processor."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import GEMMA, QWEN3, SIZES, save
from tiny_qwen3_5 import DELTA, drawn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

IMAGE_TOKENS = {
    "image_token_id": 1000,
    "video_token_id": 1001,
    "vision_start_token_id": 1002,
    "vision_end_token_id": 1003,
}
"""No text has these."""
VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 128}
QWEN3_VISION = VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja")


def save_qwen25_vl(folder: Path, **changes) -> str:
    """A Qwen2.5-VL with its own output head, and three sections in its rotary embedding."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [8, 4, 4]}
    vision = VISION | {"in_chans": 3, "window_size": 56, "fullatt_block_indexes": [1]}
    text = {**SIZES, "rope_parameters": rope, **changes}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **IMAGE_TOKENS)
    return with_vision(save(Qwen2_5_VLForConditionalGeneration(config), folder), "visual.")


def save_qwen25_vl_as_published(folder: Path) -> str:
    """The same with the config.json of the published folders: flat, with an old spelling of the rotary embedding."""
    path = save_qwen25_vl(folder)
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    text = settings.pop("text_config")
    rope, kept = text.pop("rope_parameters"), settings["model_type"]
    flat = text | settings | {"rope_theta": rope["rope_theta"], "model_type": kept}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    file.write_text(json.dumps(flat, indent=1))
    return path


def save_qwen3_vl(folder: Path, **changes) -> str:
    """A Qwen3-VL with tied embeddings, and sections that alternate."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [8, 8, 8], "mrope_interleaved": True}
    text = {**QWEN3, "rope_parameters": rope, "tie_word_embeddings": True, **changes}
    config = Qwen3VLConfig(text_config=text, vision_config=QWEN3_VISION, tie_word_embeddings=True, **IMAGE_TOKENS)
    return with_vision(save(Qwen3VLForConditionalGeneration(config), folder), "model.visual.")


def save_gemma3_vision(folder: Path, **changes) -> str:
    """A Gemma-3 that reads images: the text model of `save_gemma3` with windows in all layers but the third."""
    torch.manual_seed(0)
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    given = {key: value for key, value in GEMMA.items() if key != "attn_implementation"}
    text = {**given, "rope_parameters": ropes, "layer_types": kinds, **changes}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": 56, "patch_size": 14}
    images = {"mm_tokens_per_image": 4, "boi_token_index": 1000, "eoi_token_index": 1001, "image_token_index": 1002}
    config = Gemma3Config(text_config=text, vision_config=vision, **images)
    return with_vision(save(Gemma3ForConditionalGeneration(config), folder), "vision_tower.")


def save_qwen3_5_vision(folder: Path, **changes) -> str:
    """A Qwen3.5 that reads images, dense, with a layer that predicts a second token."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [4, 4, 4], "mrope_interleaved": True}
    text = {**DELTA, "rope_parameters": rope, "partial_rotary_factor": 0.5, **changes}
    config = Qwen3_5Config(text_config=text, vision_config=QWEN3_VISION, tie_word_embeddings=False, **IMAGE_TOKENS)
    path = with_vision(save(drawn(Qwen3_5ForConditionalGeneration(config)), folder), "model.visual.")
    file = Path(path, "model.safetensors")
    save_file(load_file(file) | {"mtp.fc.weight": torch.rand(4, 8).bfloat16()}, file, metadata={"format": "pt"})
    return path


def with_vision(path: str, prefix: str) -> str:
    """Round the vision tower to bfloat16 and add the files of a processor."""
    file = Path(path, "model.safetensors")
    tensors = load_file(file)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items() if name.startswith(prefix)}
    assert len(rounded) > 10
    save_file(tensors | rounded, file, metadata={"format": "pt"})
    for name in PROCESSORS:
        content = json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}) if name.endswith("json") else "{{ a }}"
        Path(path, name).write_text(content)
    return path
