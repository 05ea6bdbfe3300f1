"""Helpers without policy: arguments, messages, the log, what torch.compile may record."""
