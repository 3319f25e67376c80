"""Generation: vLLM inside the worker process, on the trainer's memory."""

import logging

# Instead of vLLM's own configuration of logging (`roles/environment.py`); before it is imported.
logging.getLogger("vllm").setLevel(logging.ERROR)
