from good import *

job = job.replace(dtype=torch.float16)
