"""The same pipeline over many processes of a ``torch.distributed`` group."""
