"""Estimates before a run: which machines to rent, and what a run on them would cost.

plan_inputs          a model, a profile or a job as profiles; an instance as an offer
schedule_choice      the schedule that estimates assume
fleet_estimate       culm.find_fleets: instances by time and cost
strategy_estimate    culm.compare_strategies: strategies in simulated markets
deadline_estimate    culm.estimate_deadline: policies of renting, against a deadline and a budget
"""
