"""Where managed memory comes from: allocators, arenas, allocation plans, statistics."""
