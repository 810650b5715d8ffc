from good import *

job = job.replace(model=lambda: nn.Linear(3, 10))
