from good import *

job = job.replace(loss=torch.nn.CrossEntropyLoss)
