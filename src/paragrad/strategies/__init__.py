"""How one serial training is split over workers, as values: the table of names, shares of a
batch.
"""
