"""Benchmarks: how fast culm is, and what losing nodes costs, measured next to its peers on the same machine.

common/      jobs that both sides train, paired rounds, pinned cores, isolated processes
pipeline/    `culm bench pipeline`: culm against torch.distributed.pipelining
resilience/  `culm bench resilience`: goodput under preemptions, pauses, overhead, detection;
             `culm bench dropping`: what dropped samples do to training
planner/     `culm bench planner`: quality of greedy plans, and planning time
simulator/   `culm bench simulator`: predicted against measured runs
scale/       `culm bench scale`: what the leader and an epoch cost with 64 to 1,024 nodes
observe/     `culm bench observe`: what writing a run folder and serving its page costs
gnn/         `culm bench gnn`
"""
