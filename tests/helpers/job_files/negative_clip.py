from good import *

job = job.replace(clip_norm=-1)
