"""Commands that start runs on machines of a provider.

launch_command  start machines, train, end the machines
list_command    the launches of this machine and what they cost
down_command    end everything of a launch
head_launch     the same on another machine, which stays: start, show and end
offer_table     tables of machines and prices
"""
