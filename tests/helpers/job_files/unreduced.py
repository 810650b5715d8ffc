from good import *

job = job.replace(loss=nn.CrossEntropyLoss(reduction="none"))
