"""Kernels of public projects: a file per project has its cases. Importing it registers all of them."""

from . import (  # noqa: F401
    attention_gym,
    bitsandbytes,
    cuda_samples,
    cula,
    cupy_kernels,
    cutlass_examples,
    fla,
    flaggems,
    flash_attention,
    flashinfer,
    liger,
    lightllm,
    llm_c,
    mamba,
    marlin,
    quack,
    thunderkittens,
)
