from good import *

job = job.replace(model=lambda: 3)
