"""The same pipeline over many processes of a ``torch.distributed`` group."""

from timelyfreeze.distributed.checkpoint import (
    CheckpointError,
    export_state_dict,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

__all__ = ["CheckpointError", "export_state_dict", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]
