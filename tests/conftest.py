"""What holds for every test: one thread, since stages are the unit of parallelism and two tests run side by side."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def drawn(monkeypatch):
    """The masks of every step of the test's pipelines, as the controller gave them."""
    from timelyfreeze.freeze import FreezeController

    masks = []
    begin_step = FreezeController.begin_step

    def record(self, *args, **kwargs):
        masks.append(begin_step(self, *args, **kwargs))
        return masks[-1]

    monkeypatch.setattr(FreezeController, "begin_step", record)
    return masks
