from good import *

job = job.replace(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
