from good import *

job = job.replace(model=Net())
