"""An all-reduce of your own: which rank sends what to which rank.

It is proved, drawn, timed, run, checked and compared like the built-in ones.

    python examples/own_all_reduce.py
    paragrad train examples/own_all_reduce.py --strategy "data(3, reduce=line)"
"""

import paragrad as pg


class Line(pg.AllReduce):
    """Sums the vector along a line of ranks; the last rank then sends the sum back."""

    def program(self, rank, size):
        # the vector has as many equal parts as there are ranks
        for part in range(size):
            if rank > 0:
                yield pg.Recv(rank - 1, part, add=True)
            if rank < size - 1:
                yield pg.Send(rank + 1, part)
        for part in range(size):
            if rank < size - 1:
                yield pg.Recv(rank + 1, part)
            if rank > 0:
                yield pg.Send(rank - 1, part)


job = pg.job("digits").replace(epochs=2)

if __name__ == "__main__":
    from pathlib import Path

    from paragrad.executors.machine import read_machine_file
    from paragrad.executors.text_drawing import draw_text
    from paragrad.planner.link_measurement import measure_machine
    from paragrad.planner.simulation import simulate_exchange
    from paragrad.runtime.launcher_env import count_cores

    print(draw_text(Line(), 3), "\n")
    file = Path("machine.json")
    if not file.exists():
        measure_machine("shm").write_machine_file(file)
    machine, _ = read_machine_file(file, count_cores())
    for reduce in (Line(), pg.Ring()):
        simulation = simulate_exchange(pg.Data(3, reduce=reduce), 100_000, machine)
        microseconds = 1e6 * simulation.timeline.seconds
        print(f"{reduce}: {microseconds:.0f} us for 100 KB over 3 ranks, simulated on this machine")
    print()
    table = pg.compare(job, ["serial", pg.Data(3, reduce=pg.Ring()), pg.Data(3, reduce=Line())])
    print(table)
    print(f"\n{table.folder}/page.html")
