from good import *

job = job.replace(model=lambda: nn.Linear("a", 3))
