from good import *

job = job.replace(optimizer=lambda parameters: torch.optim.LBFGS(parameters))
