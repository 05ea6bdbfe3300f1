"""The limits of managed memory in the residency benchmarks. Does not import torch."""

GIB = 1024**3
LIMIT = 8 * GIB  # of managed memory, in every column that uses any
MOST_BUDGET = LIMIT - GIB // 2  # below the limit, so that the budget and not the limit stops the engine
MARGIN = 6 * GIB  # what a card must have free beside the limit; as in tests/_gpu_guard.py
