"""Loops that were written for other libraries run on this package by one changed line.

>>> from timelyfreeze.compat import torch_schedule
"""

from timelyfreeze.compat.torch_schedule import TorchSchedule, torch_schedule

__all__ = ["TorchSchedule", "torch_schedule"]
