from good import *


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(digits)


job = job.replace(train=Stream())
