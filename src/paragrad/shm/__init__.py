"""A torch.distributed backend over memory that the ranks of one Linux host share."""
