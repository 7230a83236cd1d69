"""The cases of kernels_of_others.py: a file per project. Importing it registers all of them."""

from . import (  # noqa: F401
    bitsandbytes,
    cuda_samples,
    cutlass_examples,
    fla,
    flaggems,
    liger,
    lightllm,
    llm_c,
    mamba,
    quack,
)
