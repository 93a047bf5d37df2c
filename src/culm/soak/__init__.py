"""Soak: real processes under real faults for a long time, with their memory, files and processes on record."""
