"""Recordings of allocations and accesses: written, read, replayed. Nothing else needs them."""
