"""Backends of torch.distributed. Importing this registers them:
`dist.init_process_group("shm")`.
"""

from paragrad.world.backends.shm.group import register

register()
