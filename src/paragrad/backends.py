"""Backends of torch.distributed. Importing this registers them:
`dist.init_process_group("shm")`.
"""

import paragrad.world.backends  # noqa: F401
