"""Managed tensors: factories, moves, and the operators in torch.ops.torch_uvm."""
