"""Commands that read a run, during it or afterwards.

report_command  report on runs as one HTML file
dash_command    watch a run in a browser
cost_command    what the nodes of a run have cost
replay_command  repeat the decisions of a run's leaders
verify_command  retrain a run between its checkpoints and compare
export_command  export the weights of a checkpoint as one file
"""
