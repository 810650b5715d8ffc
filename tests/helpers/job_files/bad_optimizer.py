from good import *

job = job.replace(optimizer=lambda parameters: None)
