from good import *

job = job.replace(
    model=lambda: nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)), batch=48
)
