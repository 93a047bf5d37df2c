"""Commands that look ahead of a run: what layers cost, what to rent, what a step looks like.

profile_command   measure what each layer costs
plan_command      plan what to rent, or a step with failed slots
schedule_command  draw a schedule
prices_command    list and compare prices of instances, read new ones

fleet_command     the search over instances, for `culm plan`
plan_output       tables and JSON of a plan;  fleet_output  ... of a list of fleets
price_warnings    warnings about old or doubtful prices
"""
