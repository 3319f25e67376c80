"""Part 3, ten minutes: a billion parameters: sft that learns, saves and resumes; memory and its plan; GRPO with vLLM.

python scripts/gpu_day/part3_train.py [--device cpu --small | --rehearse] [--out outputs/gpu_day]
"""

import sys

from day import STEPS, part

LIMIT_S = 200
RUNS = {name: STEPS / f"{name}.py" for name in ("sft", "sft_memory", "grpo")}

if __name__ == "__main__":
    sys.exit(part("part3_train", RUNS, LIMIT_S, __doc__))
