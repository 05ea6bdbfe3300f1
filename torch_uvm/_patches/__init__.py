"""Everything that replaces an attribute of PyTorch; README.md lists each of them."""
