"""What strategies need inside a rank: exchanges, slices of state, batch norm and draws that do
not see the split.
"""
