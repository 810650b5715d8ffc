"""Cost models: predictions of exchanges, models and steps.

simulation.py     what an exchange costs
profile.py        what work a model has
step_timeline.py  how long a step takes, from earlier steps of the same run
"""
