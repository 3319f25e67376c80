"""Part 1, ten minutes: numerics of kernels that no CPU has, against float64: packed attention, experts, Adam, 8 bits.

python scripts/gpu_day/part1_kernels.py [--device cpu --small | --rehearse] [--out outputs/gpu_day]
"""

import sys

from day import of_gpu_check, part

LIMIT_S = 75
KERNELS = ("varlen", "experts", "adam", "fp8", "logits", "head", "weight_gradient", "context_blocks")

if __name__ == "__main__":
    sys.exit(part("part1_kernels", of_gpu_check(*KERNELS), LIMIT_S, __doc__))
