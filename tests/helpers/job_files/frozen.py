from good import *

job = job.replace(model=lambda: Net().requires_grad_(False))
