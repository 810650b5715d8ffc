from good import *

job = job.replace(train=lambda folder: iter([]))
