"""Lines on where a response ends, where tokenizer, chat template and generation_config.json of a folder disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoint.model_folder import GENERATION, ModelFolder
from megatron_rl.data.message_form import ANSWER, QUESTION
from megatron_rl.data.template_process import Renderer, TemplateRefusal


def end_token_notes(folder: ModelFolder, template_kwargs: Mapping[str, Any], is_chat: bool) -> list[str]:
    """Return a line for each disagreement of a folder's files on where a response ends.

    is_chat: whether there are messages, which the chat template writes.
    """
    tokenizer, ends = folder.tokenizer, folder.end_tokens
    notes = []
    if ends.disagree:
        names = tokenizer.convert_ids_to_tokens(ends.ids)
        both = ", ".join(f"{name} ({number})" for name, number in zip(names, ends.ids, strict=True))
        notes.append(
            f"the files of {folder.given} name different end tokens: its tokenizer {ends.own}, its {GENERATION} or "
            f"config.json {', '.join(map(str, ends.declared))}; responses end at each of {both}"
        )
    written = written_end(tokenizer, template_kwargs) if is_chat and tokenizer.chat_template is not None else None
    if written is not None and written not in ends.ids:
        name = tokenizer.convert_ids_to_tokens(written)
        notes.append(
            f"the chat template of {folder.given} ends a turn with {name} ({written}), at which no response stops; "
            f"try: name {written} in eos_token_id of its {GENERATION}"
        )
    return notes


def written_end(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> int | None:
    """Return the special token that the chat template writes right behind a last response; None where it writes none,
    or refuses the conversation, which reading the data reports.
    """
    renderer = Renderer(tokenizer, {**template_kwargs, "add_generation_prompt": False})
    try:
        (text,) = renderer.texts([[QUESTION, {"role": "assistant", "content": ANSWER}]])
    except TemplateRefusal:
        return None
    finally:
        renderer.close()
    behind = text.rpartition(ANSWER)[2].strip()
    ids: Sequence[int] = tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None
