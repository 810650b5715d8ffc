"""What travels: schedules as values. Standard library only; nothing here knows torch, a clock
or a file.
"""
