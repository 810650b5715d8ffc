from good import *

job = job.replace(train=TensorDataset(*digits.tensors, digits.tensors[1]))
