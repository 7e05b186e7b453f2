"""Programmatic dependent launch: a kernel may be launched before the one it depends on has ended.

On Hopper and newer the second of two kernels can be set up while the first still runs; it must then
wait, before it touches any memory that an earlier kernel writes or reads. Every kernel launched so
begins with `wait_previous`: as each of them waits before it can end, all earlier kernels have ended
too. `launch_next` allows the following kernel's launch once every program of this one has begun.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_dspark.kernels.launch import describe_device


@cache
def dependent_launches(device: torch.device) -> bool:
    """Whether launches on `device` may be dependent: sm_90 and newer, not the interpreter."""
    return device.type == "cuda" and describe_device(device).arch >= 90


@triton.jit
def wait_previous(DEPENDENT: tl.constexpr):
    """Blocks until the kernels launched before have ended and their writes are visible."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def launch_next(DEPENDENT: tl.constexpr):
    """Lets the next kernel's programs become resident where there is room."""
    if DEPENDENT:
        gdc_launch_dependents()
