"""The same pipeline over many processes with torch.distributed."""
