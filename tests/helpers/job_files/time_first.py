from good import *


def stack_time_first(samples):
    return torch.stack([image.view(8, 8) for image, _ in samples], dim=1), torch.stack(
        [label for _, label in samples]
    )


class OfRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(8, 10)

    def forward(self, rows):
        return self.rnn(rows)[1][0]


job = job.replace(model=OfRows, collate=stack_time_first)
