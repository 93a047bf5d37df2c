"""How fast culm is, and how it fares when nodes vanish, measured beside its peers on the same machine in one run.

job       what both sides train: the fixed GPTs, their cut into stages, their data
ranks     processes with a Gloo group among them, and the wire to command them
rank      what runs inside such a process: its stages under torch's schedule
peer      TorchPipeline: the side culm is compared with
paired    alternating rounds, the median ratio and its interval
overhead  what torch's schedule runtime costs when there is nothing to compute
planner   `culm bench planner`: how good plans are, and how long planning takes
optima    random cases with proved optima
pipeline  `culm bench pipeline`: the rows, the JSON, the table; apart: rows side by side, on cores of their own
resilience  `culm bench resilience`: what each strategy costs, put together from
  resilience_plan      how long it looks, and at what       resilience_result    its JSON and its table
  resilience_losses    goodput under the same losses, and the tuned checkpoint baseline
  resilience_pause     how long a loss holds a run up, beside the bound of `pause`
  resilience_overhead  what a strategy costs while nothing befalls a run
  detection            from SIGKILL until the last node has the new epoch
pause     every loss of a small job in simulated time, beside the planner's bound
observe   `culm bench observe`: what it costs to write a run down, and to be looked at
dropping  `culm bench dropping`: what dropped samples do to training
simulator  `culm bench simulator`: predicted against measured; napping: the jobs it runs
scale     how the simulator's time grows with events        capped    the proof of one optimum
pictures  the drawings of docs/how-recovery-works.md
gnn       `culm bench gnn`; gnn_case, gnn_sides, gnn_ours, gnn_peers: what is compared; gnn_accuracy: what is learned;
          gnn_machine: a whole machine of many cores; gnn_ceiling: what that machine allows
ours      CulmPipeline: culm's side                         probes    figures beside the pipeline bench
emulated  layers that sleep, so that there may be more workers than cores
computed  layers that really compute, for the same benches
slow      storage that takes its time
lanes     several emulated runs at a time                   pinned    a core for each worker
"""
