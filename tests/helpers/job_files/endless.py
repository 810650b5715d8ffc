from good import *


class Endless(torch.utils.data.Dataset):
    def __len__(self):
        return 10**12

    def __getitem__(self, index):
        return digits[index % len(digits)]


job = job.replace(train=Endless())
