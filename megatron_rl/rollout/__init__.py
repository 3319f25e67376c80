"""Generation: vLLM inside the worker process, on the trainer's memory."""

import logging

# Instead of vLLM's own configuration of logging, before it is imported. A rank's environment may say another level.
if logging.getLogger("vllm").level == logging.NOTSET:
    logging.getLogger("vllm").setLevel(logging.ERROR)
