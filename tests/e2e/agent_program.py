"""An agent as a program that imports no library of a second: it thinks, asks once, and posts its reward.

`agents_for_tests.py` is one with OpenAI's client.
"""

from __future__ import annotations

import json
import os
import sys
import time
from urllib.request import Request, urlopen

THINKS_S = 0.5


def post(path: str, body: dict) -> dict:
    """Send JSON to the endpoint of this episode, and return its reply."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)) as answer:
        return json.loads(answer.read() or b"{}")


def main() -> None:
    task = json.load(sys.stdin)
    time.sleep(THINKS_S)
    prompt = task["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = post("/chat/completions", {"model": "policy", "messages": messages})
    said = answer["choices"][0]["message"]["content"]
    post("/reward", {"reward": float(said == task["ground_truth"])})


if __name__ == "__main__":
    main()
