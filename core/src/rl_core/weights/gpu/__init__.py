"""The digest of tensors on a GPU."""
