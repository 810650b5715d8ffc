"""Steps of a pipeline of two stages on one host: ours, torch.distributed.pipelining's 1F1B over gloo and over shm, and bounds.

| figure | bar |
|---|---|
| speed over torch's 1F1B on gloo: h=512 batch=256 micro=4 | at least 1.4 |
| ... every setting | at least 1.0 |
| ... geometric mean of the four settings | at least 1.2 |
| speed over the bound's: every setting | at least 0.8 |
| ... geometric mean | at least 0.88 |

Eight Linear(h, h) in float32, four on each rank, one thread each, SGD. The bound is two processes that each make the forwards
and backwards of their four layers without messages, both at once, times (m + p - 1)/m. Ours is a whole training, timed by its
record from step to step; torch's is a loop over batches cut out of tensors in memory. Beside it, without a bar: one worker
with all threads, and our other schedules.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Bench, alternated, ratios
from torch import Tensor, nn
from trainings import ours, theirs
from workers import Workers, serve

import paragrad as pg
from paragrad.world.launching import Ranks

LAYERS, STAGES, BATCHES = 8, 2, 4


@dataclass(frozen=True)
class Setting:
    """A width, a global batch, and its micro-batches."""
    width: int
    batch: int
    micro: int

    def __str__(self) -> str:
        return f"h={self.width} batch={self.batch} micro={self.micro}"

    def layers(self, count: int = LAYERS) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(count)))

    def data(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        return tuple(torch.randn(BATCHES * self.batch, self.width, generator=draw) for _ in range(2))   # type: ignore[return-value]

    def job(self) -> pg.Job:
        return pg.Job(name="benchmark", model=self.layers, loss=nn.functional.mse_loss,
                      optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                      train=lambda folder: torch.utils.data.TensorDataset(*self.data()), batch=self.batch, epochs=1000)

    @property
    def steps(self) -> int:
        """About a second of them."""
        return max(10, min(200, int(6e10 / (6 * LAYERS * self.batch * self.width**2))))


SETTINGS = [Setting(512, 256, 4), Setting(512, 1024, 8), Setting(1024, 1024, 8), Setting(2048, 512, 8)]
OURS = ("one_f_one_b", "gpipe", "zero_bubble")


def main() -> None:
    bench = Bench(__doc__, lambda parser: parser.add_argument("--worker", nargs=2))
    if bench.options.worker:
        worker(*bench.options.worker)
        return
    with tempfile.TemporaryDirectory() as folder, Ranks(STAGES) as ranks:
        peers = {kind: Workers(__file__, kind, STAGES) for kind in ("torch, gloo", "torch, shm", "half")}
        times = {}
        for setting in SETTINGS[:1] if bench.quick else SETTINGS:
            measures = {f"pipeline(2, {schedule})": ours(ranks, f"pipeline(2, micro={setting.micro}, schedule={schedule}, "
                                                         "cut=[4, 4])", setting, Path(folder)) for schedule in OURS}
            measures["serial"] = ours(ranks, "serial", setting, Path(folder))
            measures |= {kind: theirs(workers, setting) for kind, workers in peers.items()}
            print(f"{setting} [ms]", flush=True)
            times[setting] = alternated(measures, bench.rounds(7, quick=2))
        for workers in peers.values():
            workers.close()
    report(bench, times)
    bench.finish()


def report(bench: Bench, times: dict[Setting, dict[str, list[float]]]) -> None:
    bench.measured["ms per step"] = {str(setting): found for setting, found in times.items()}
    speeds: dict[str, list[list[float]]] = {}
    for number, (setting, found) in enumerate(times.items()):
        mine = found["pipeline(2, one_f_one_b)"]
        bound = [each * (setting.micro + STAGES - 1) / setting.micro for each in found["half"]]
        for name, other, bar in (("torch's 1F1B on gloo", found["torch, gloo"], 1.0 if number else 1.4),
                                 ("torch's 1F1B on shm", found["torch, shm"], None), ("the bound", bound, 0.8),
                                 ("serial", found["serial"], None)):
            speeds.setdefault(name, []).append(ratios(other, mine))
            bench.figure(f"speed over {name}, {setting}", speeds[name][-1], at_least=bar)
        for schedule in OURS[1:]:
            bench.figure(f"one_f_one_b's time over {schedule}'s, {setting}", ratios(mine, found[f"pipeline(2, {schedule})"]))
    for name, bar in (("torch's 1F1B on gloo", 1.2), ("torch's 1F1B on shm", None), ("the bound", 0.88), ("serial", None)):
        bench.figure(f"speed over {name}, geometric mean",
                     [math.prod(row) ** (1 / len(row)) for row in zip(*speeds[name], strict=True)], at_least=bar)


# ---- in a rank -----------------------------------------------------------------------------------------------------------
def worker(kind: str, address: str) -> None:
    import torch.distributed as dist

    import paragrad.world.backends  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if kind == "torch, gloo" else "shm")

    def starts(setting: Setting) -> list[float]:
        torch.manual_seed(0)
        part = setting.layers(LAYERS // STAGES)
        step, update = (half if kind == "half" else scheduled)(setting, part), torch.optim.SGD(part.parameters(), lr=0.01)
        inputs, targets = setting.data()
        order, found = torch.randperm(len(inputs)), []
        for number in range(setting.steps):
            found.append(time.perf_counter())
            place = number % BATCHES * setting.batch
            mine = order[place:place + setting.batch]
            update.zero_grad()
            step(inputs[mine], targets[mine])
            update.step()
        dist.barrier()
        return found
    serve(address, starts)
    dist.destroy_process_group()


def scheduled(setting: Setting, part: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    """A step of torch.distributed.pipelining."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    rank = dist.get_rank()
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, setting.micro, loss_fn=nn.functional.mse_loss)
    return lambda inputs, target: schedule.step(inputs) if rank == 0 else schedule.step(target=target)


def half(setting: Setting, part: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """The forwards and backwards of one rank, with what it would be sent at hand."""
    import torch.distributed as dist
    rank = dist.get_rank()

    def step(inputs: Tensor, target: Tensor) -> None:
        for x, y in zip(inputs.chunk(setting.micro), target.chunk(setting.micro), strict=True):
            x = x.requires_grad_(rank > 0)
            out = part(x)
            out.backward(y) if rank == 0 else nn.functional.mse_loss(out, y).backward()
    return step


if __name__ == "__main__":
    main()
