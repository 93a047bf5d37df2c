"""Verify a run afterwards: retrain it between its checkpoints in one process, and compare digests layer by layer.

verify_run           culm.verify
recorded_run         read from a run folder which job was trained, how, and what can be verified
retrain              retrain the steps and compare the state at every checkpoint
verification_result  what was found
"""
