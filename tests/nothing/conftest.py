import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def without_a_gpu():
    """These tests need nothing, and a GPU that happens to be there changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
