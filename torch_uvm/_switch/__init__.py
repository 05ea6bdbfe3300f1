"""Whether new tensors are managed: the process-wide switch, and scopes of threads."""
