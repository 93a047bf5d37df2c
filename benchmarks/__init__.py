"""How fast culm is, measured beside torch.distributed.pipelining in the same minutes on the same machine.

job       what both sides train: the fixed GPTs, their cut into stages, their data
ranks     processes with a Gloo group among them, and the wire to command them
rank      what runs inside such a process: its stages under torch's schedule
peer      TorchPipeline: the side culm is compared with
paired    alternating rounds, the median ratio and its interval
overhead  what torch's schedule runtime costs when there is nothing to compute
planner   `culm bench planner`: how good plans are, and how long planning takes
optima    random cases with proved optima
pipeline  `culm bench pipeline`: the rows, the JSON, the table
resilience  `culm bench resilience`: what each strategy costs while nothing befalls a run, and when something does
"""
