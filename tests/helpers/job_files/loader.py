from good import *

job = job.replace(train=torch.utils.data.DataLoader(digits, batch_size=16, shuffle=True))
