"""Dry runs inside the process that runs the script: operators allocate, and do not compute."""
