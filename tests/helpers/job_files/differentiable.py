from good import *

job = job.replace(optimizer=lambda parameters: torch.optim.AdamW(parameters, differentiable=True))
