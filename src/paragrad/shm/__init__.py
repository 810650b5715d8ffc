"""The backend shm of torch.distributed: memory that ranks of one Linux host share."""
