"""Tiny random vision-language models as whole folders: language model, tower, tokenizer, chat template, and settings of
the image processor. Everything is float32, and every tensor matters for what the model returns.

Ids: 0 pads, 1 ends a turn, 2 begins one, 3 to 258 are bytes, 259 to 262 the names of four colours; then the marks of
images. Text that is drawn from ids 3 to 258 has no picture in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import QWEN3, SIZES, save
from tiny_qwen3_5 import DELTA, EXPERTS, drawn

PAD, END, BEGIN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
COLOURS = ("red", "green", "blue", "yellow")
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
FIRST_BYTE, FIRST_COLOUR, FIRST_MARK = 3, 259, 263
IMAGE, VIDEO, VISION_START, VISION_END = range(FIRST_MARK, FIRST_MARK + len(MARKS))
VOCABULARY = FIRST_MARK + len(MARKS)
MARK_SETTINGS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": None, "initializer_range": 0.1}
TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 128}
TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.1}
QWEN3_TOWER = TOWER | {"patch_size": 16, "in_channels": 3, "num_position_embeddings": 64}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
INTERLEAVED = ROPE | {"mrope_section": [10, 7, 7], "mrope_interleaved": True}
PARTIAL = ROPE | {"mrope_section": [4, 4, 4], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


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
    save_vision_tokenizer(folder)
    save_processor(folder, tower["patch_size"])
    return path


def save_vision_tokenizer(folder: Path) -> None:
    """Bytes, four colours, and the marks of turns and images, with a chat template of text and image parts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [PAD, END, BEGIN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END, BEGIN])
    tokenizer.add_tokens([*COLOURS])
    tokenizer.add_special_tokens([*MARKS])
    marks = {"pad_token": PAD, "eos_token": END}
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **marks)
    assert whole.convert_tokens_to_ids([COLOURS[0], *MARKS]) == [FIRST_COLOUR, IMAGE, VIDEO, VISION_START, VISION_END]
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
