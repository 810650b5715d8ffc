from good import *

job = job.replace(train=TensorDataset(torch.zeros(0, 64), torch.zeros(0)))
