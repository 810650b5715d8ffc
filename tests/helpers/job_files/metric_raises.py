from good import *


def broken(output, target):
    return output.argmax(2).sum(), len(target)


job = job.replace(metric=broken)
