"""Generation: vLLM inside the worker process, on the trainer's memory."""
