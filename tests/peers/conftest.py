"""Tests with the packages that call kda, or that kda stands in for.  They are installed apart from the rest:

    .venv/bin/pip install --no-deps --target .venv/peers -r tests/peers/requirements.txt
    PYTHONPATH=.venv/peers .venv/bin/python -m pytest tests/peers

Without them these tests skip.  None needs a GPU: what FLA leaves to Triton fails on a CPU, and that is looked for.
"""

import pytest

from kda.tools.verify import literal


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with literal.one_thread():
        yield


@pytest.fixture
def in_fla():
    """kda registered in FLA, with nothing said yet."""
    import kda.fla

    kda.fla.disable()
    kda.fla.use()
    yield kda.fla
    kda.fla.disable()
    kda.fla.use()
