"""Where the bytes of managed tensors are: budgets, limits, pins, hints, steps."""
