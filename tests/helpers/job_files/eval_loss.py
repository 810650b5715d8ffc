from good import *


class Heads(Net):
    def forward(self, x):
        output = self.layers(x)
        return {"out": output} if self.training else output


job = job.replace(
    model=Heads,
    metric=None,
    loss=lambda output, target: nn.functional.cross_entropy(output["out"], target),
)
