"""Commands that train a job, and what a job needs before it can train.

run_command    train a job on local nodes, or lead one that other machines join
agent_command  join a run from another machine
head_command   start a store that other machines join through, and print its token
data_command   tokenize text into token files

run_launcher   start a run: supervisor, signals, and the output of user code
"""
