"""What holds for every test: one thread, since stages are the unit of parallelism and two tests run side by side."""

import os

import pytest
import torch
from hypothesis import settings

# torch looks up the name of every peer that connects to a store, 127.0.0.1 too, and holds up the store meanwhile: 5 s
# or 10 s where a name server's answer is lost. No test needs a name server; this is inherited by ranks' processes.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

torch.set_num_threads(1)
# The same examples everywhere and no deadline on a busy machine; `--hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None)
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.load_profile("fixed")


# Ranks that are processes of their own fill both cores, and give each other up after seconds: one such test at a time.
OF_PROCESSES = ("test_distributed_", "test_cli_distributed", "test_compat")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name.startswith(OF_PROCESSES):
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(autouse=True)
def to_the_last_bit(request, monkeypatch):
    """Pipelines here run the modules' own forwards, so that parity can be exact, unless a test says accelerate=True.

    The commands are tested as people run them.
    """
    from timelyfreeze import FreezingPipeline

    if not request.path.name.startswith("test_cli"):
        monkeypatch.setitem(FreezingPipeline.__init__.__kwdefaults__, "accelerate", False)


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
