from good import *


def pack_rows(samples):
    rows = nn.utils.rnn.pack_sequence([image.view(8, 8) for image, _ in samples])
    return rows, torch.stack([label for _, label in samples])


class OfRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(8, 10)

    def forward(self, rows):
        return self.rnn(rows)[1][0]


job = job.replace(model=OfRows, collate=pack_rows)
