"""What a policy has said, apart from what it thought before: a call inside of a thought is no call. No torch.

Most models think at the beginning of a response, between two marks; a template may open the thought at the end of the
prompt. gpt-oss writes messages to channels: analysis is a thought, a message to a function is a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.data.message_form import MARKS, thought_marks

CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTIONS = "functions."


@dataclass(frozen=True)
class Said:
    """A response. thought: without its marks. rest: what follows the thought. calls: name and arguments as JSON text,
    where channels tell them apart; other calls stand in `rest`.
    """

    thought: str
    rest: str
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ThoughtMarks:
    """Thoughts between two marks. is_open: the prompt has the first one. is_known: the chat template has the marks, so
    thoughts are a field of messages; else they are part of the text.
    """

    opening: str
    closing: str
    is_open: bool = False
    is_known: bool = True

    def read(self, text: str) -> Said:
        """Tell a thought from what follows it. A thought that does not end is the whole response."""
        begun = text.lstrip()
        if begun.startswith(self.opening):
            thought, _, rest = begun[len(self.opening) :].partition(self.closing)
        elif self.is_open or (self.is_known and self.closing in text):
            thought, _, rest = text.partition(self.closing)
        else:
            return Said("", text)
        return Said(thought.strip(), rest.lstrip("\n"))


@dataclass(frozen=True)
class Channels:
    """The channels of gpt-oss."""

    is_known = True

    def read(self, text: str) -> Said:
        """Read the messages of a response: thoughts, texts and calls, each in order."""
        thoughts, texts, calls = [], [], []
        for message in text.split("<|start|>"):
            header, has_body, body = message.partition("<|message|>")
            if not has_body:
                continue
            for end in ENDS:
                body = body.removesuffix(end)
            channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
            if recipient is not None and recipient[1].startswith(FUNCTIONS):
                calls.append((recipient[1].removeprefix(FUNCTIONS), body))
            elif channel is not None and channel[1] == "analysis":
                thoughts.append(body)
            else:
                texts.append(body)
        if not (thoughts or texts or calls):
            return Said("", text)
        return Said("\n".join(thoughts), "\n".join(texts), tuple(calls))


Thoughts = ThoughtMarks | Channels

PLAIN = ThoughtMarks(*MARKS[0], is_known=False)
"""Where no template says how the policy thinks."""


def thoughts_of(template: str | None, prompt: str) -> Thoughts:
    """Return how a model with this chat template thinks. prompt: as the template writes it, to the beginning of a
    response.
    """
    if template is None:
        return PLAIN
    if "<|channel|>analysis" in template:
        return Channels()
    marks = thought_marks(template)
    if marks is None:
        return PLAIN
    return ThoughtMarks(*marks, is_open=prompt.rfind(marks[0]) > prompt.rfind(marks[1]))
