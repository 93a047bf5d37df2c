"""`culm.doctor`: whether this machine can run culm.

check_result    the result of one check
gpu_checks      GPUs, their libraries and their memory
machine_check   all checks, with an etcd and a small run that loses a node
"""
