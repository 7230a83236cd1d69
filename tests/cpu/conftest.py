import pytest
import torch

from kda.tools.verify import literal


@pytest.fixture(autouse=True, scope="module")
def without_a_gpu():
    """These tests need nothing, and a GPU that happens to be there changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small, and other tests run beside these."""
    with literal.one_thread():
        yield
