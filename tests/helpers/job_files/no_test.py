from good import *

from paragrad import EarlyStopping

job = job.replace(test=None, metric=None, callbacks=[EarlyStopping(patience=3)])
