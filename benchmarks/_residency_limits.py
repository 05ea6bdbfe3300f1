"""How much managed memory the residency benchmarks may have. No torch is needed to know it."""

GIB = 1024**3
LIMIT = 8 * GIB  # of managed memory, in every column that has any
MOST_BUDGET = LIMIT - GIB // 2  # so that the limit is never what stops an engine within its budget
ROOM = 16  # a card must have so many times the limit free
