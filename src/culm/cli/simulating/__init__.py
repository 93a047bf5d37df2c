"""Commands that simulate runs under a market, and prepare the markets.

simulate_command  estimate what a run would cost
trace_command     show, convert, generate and fit market traces

deadline_output   how often simulated runs meet a deadline or a budget
"""
