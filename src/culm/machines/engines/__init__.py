"""Engines: one module for each machine provider of `culm launch --on NAME`."""
