"""Marks of tests for which some versions that pyproject.toml permits are too old; README names what does not work."""

import pytest
import torch
from packaging.version import Version

compiles_named_tuples = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.11"),
    reason="the torch.compile of torch 2.9 and 2.10 traces no properties of a NamedTuple",
)
