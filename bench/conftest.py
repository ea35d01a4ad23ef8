"""What holds for every benchmark: one thread a stage, which is how all sides are compared."""

import torch

torch.set_num_threads(1)
