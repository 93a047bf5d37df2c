"""Commands that test a machine, and culm on it.

doctor_command  check this machine
bench_command   run the benchmarks
chaos_command   simulate random runs with random faults
soak_command    real processes under real faults for a long time
"""
