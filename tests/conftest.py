"""What holds for every test: one thread, since stages are the unit of parallelism and two tests run side by side."""

import torch

torch.set_num_threads(1)
