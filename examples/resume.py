"""Stop, and resume under another strategy with another number of workers: the same training.

    python examples/resume.py

It prints both losses, and how often each sample was used.
"""

import paragrad as pg

if __name__ == "__main__":
    job = pg.job("digits").replace(epochs=2)
    whole = pg.train(job, "serial")
    # a checkpoint every ten steps, and at the end
    half = pg.train(job.replace(epochs=1), "data(3)", save=10)
    rest = pg.train(job, "data(2, reduce=ring)", resume=half.folder)
    print(f"straight through {whole.losses[-1]:.4f}, in two halves {rest.losses[-1]:.4f}")
    print(rest.sample_count)
